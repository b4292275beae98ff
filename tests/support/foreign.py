"""Drafter folders as other projects write them, from what is known of their layouts: field names,
tensor names and conventions. Nothing here is read by the code under test."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.interface import Drafter
from tests.support.drafters import model_on

Write = Callable[[Drafter, Path], None]


def half_model_on(target: Path, **fields: Any) -> Drafter:
    """`model_on`, whose weights a bf16 file holds exactly."""
    model = model_on(target, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        if fields.get("own_head"):
            model.head.copy_(torch.randn_like(model.head).bfloat16())
    return model


def edit(folder: Path, **changes: Any) -> None:
    """Set fields of config.json, ``a__b`` inside the object ``a``; None removes."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, inner = name.split("__")
        section = raw[outer[0]] if outer else raw
        section[inner] = value
        if value is None:
            del section[inner]
    path.write_text(json.dumps(raw))


def transformer(config: DrafterConfig, model_type: str = "qwen3") -> dict[str, Any]:
    """What a transformers config of the older generation says of the draft layers."""
    return {
        "attention_bias": False,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": model_type,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def write_deepspec(model: Drafter, folder: Path) -> None:
    config = model.config
    raw = transformer(config)
    raw |= {"num_target_layers": config.num_target_layers, "dtype": "bfloat16"}
    raw["target_layer_ids"] = list(config.target_layer_ids)
    if config.method == "eagle3":
        raw |= {"architectures": ["Qwen3Eagle3Model"], "draft_num_hidden_layers": 1}
        raw |= {"ttt_length": config.block_size, "step_loss_decay": 0.8}
        raw["target_model_name_or_path"] = "somewhere"
    else:
        raw |= {"architectures": ["Qwen3DSparkModel"], "block_size": config.block_size}
        raw |= {"mask_token_id": config.mask_token_id, "num_anchors": 512}
        raw |= {"markov_rank": config.markov_rank}
        raw["enable_confidence_head"] = config.enable_confidence_head
        if config.markov_rank:
            raw["markov_head_type"] = config.markov_head_type
        if config.enable_confidence_head:
            raw["confidence_head_with_markov"] = config.confidence_head_with_markov
    copies = {"embed_tokens.weight": model.embedding, "lm_head.weight": model.head}
    _write(folder, raw, {**model.state_dict(), **copies})


def write_zlab(model: Drafter, folder: Path) -> None:
    config = model.config
    second = config.method == "dflash2"
    own: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    raw = transformer(config) | {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "num_target_layers": config.num_target_layers,
        "dflash_config": own,
    }
    rows = config.block_size + 1
    if second:
        raw |= {"is_causal": False, "rope_parameters": dict(config.rope_parameters)}
        del raw["rope_theta"], raw["rope_scaling"]
        own |= {"block_size": rows, "conv_kernel_size": 2}
        own |= {"conv_group_size": config.conv_group_size, "selector_rank": config.markov_rank}
        own["selector_top_k"] = config.selector_top_k
    else:
        raw["block_size"] = rows
    if any(config.windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        raw |= {"layer_types": kinds, "sliding_window": max(config.windows)}
        raw |= {"use_sliding_window": True, "is_causal": config.causal_windows}
    if config.output_multiplier != 1.0:
        own["output_multiplier"] = config.output_multiplier
        own["final_logit_softcapping"] = config.final_logit_softcapping
    _write(folder, raw, model.state_dict())


def write_specforge_dspark(model: Drafter, folder: Path) -> None:
    config = model.config
    raw = transformer(config) | {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "attention_mode": "gqa",
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "projector_type": "dspark",
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type,
            "confidence_head_alpha": 1.0 if config.enable_confidence_head else 0.0,
            "confidence_head_with_markov": config.confidence_head_with_markov,
        },
    }
    _write(folder, raw, model.state_dict())


def write_specforge_export(model: Drafter, folder: Path) -> None:
    """The same after the script that renames it for a server."""
    write_specforge_dspark(model, folder)
    edit(folder, architectures=["Qwen3DSparkModel"], markov_rank=model.config.markov_rank)


def write_specforge_eagle3(model: Drafter, folder: Path) -> None:
    config = model.config
    raw = transformer(config, "llama") | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.num_draft_logits,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.target_layer_ids)},
    }
    del raw["layer_types"]
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor
        for name, tensor in model.state_dict().items()
        if name not in ("head", "draft_vocab.ids")
    }
    _write(folder, raw, {**tensors, **_vocabulary(model), "lm_head.weight": model.head})


def write_speculators(model: Drafter, folder: Path) -> None:
    config = model.config
    chain = config.method == "eagle3"
    names = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "eagle3": "Eagle3"}
    layer_ids = [i + 1 for i in config.target_layer_ids]  # counted from the embedding's output
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size}
    raw: dict[str, Any] = {
        "architectures": [names.get(config.method, "DFlash2DraftModel")],
        "speculators_model_type": config.method,
        "speculators_version": "0.6.0",
        "transformer_layer_config": transformer(config, config.family),
        "draft_vocab_size": config.num_draft_logits,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "somewhere", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    if chain:
        raw |= {"eagle_aux_hidden_state_layer_ids": layer_ids, "norm_before_residual": False}
    else:
        raw |= {"aux_hidden_state_layer_ids": layer_ids, "mask_token_id": config.mask_token_id}
        raw |= {"block_size": config.block_rows, "sample_from_anchor": config.anchor_predicts}
    if config.method == "dspark":
        raw |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov_head_type}
        raw["enable_confidence_head"] = config.enable_confidence_head
        raw["confidence_head_with_markov"] = config.confidence_head_with_markov
    if config.method == "dflash2":
        raw |= {"conv_kernel_size": 2, "conv_group_size": config.conv_group_size}
        raw |= {"selector_rank": config.markov_rank, "selector_top_k": config.selector_top_k}
    kept = ("head", "draft_vocab.ids")
    tensors = {name: t for name, t in model.state_dict().items() if name not in kept}
    tensors |= {"embed_tokens.weight": model.embedding, "lm_head.weight": model.head}
    _write(folder, raw, {**tensors, **_vocabulary(model)})


def _vocabulary(model: Drafter) -> dict[str, Tensor]:
    if model.draft_vocab is None:
        return {}
    ids = model.draft_vocab.ids
    chosen = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    chosen[ids] = True
    return {"t2d": chosen, "d2t": ids - torch.arange(len(ids))}


def _write(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    halves = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
