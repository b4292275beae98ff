"""DeepSpec's checkpoints, and ours, which are like them but for a section and two tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.config import (
    OWN_SECTION,
    DrafterConfig,
    json_fields,
    read_json,
)
from dspark.modeling.drafters.formats.layout import Layout, Raw, block, full_attention_shape
from dspark.modeling.drafters.interface import Drafter

ARCHITECTURES = ("DSparkModel", "Eagle3Model")  # after the family's name

_OURS, _THEIRS = "DSpark Serve", "DeepSpec"
_EAGLE3_TAPS = 5  # what their EAGLE-3 asserts
# Fields that only training reads, but that a model of theirs is not made without, and their
# published values.
_TRAINING_FIELDS = {"num_anchors": 512, "step_loss_decay": 0.8}


def read(raw: Raw, target_layers: int | None) -> Layout:
    """See `read_layout`."""
    if OWN_SECTION in raw.fields:
        return Layout(format=_OURS, path=raw.path, fields=json_fields(raw.fields, raw.path))
    full_attention_shape(raw)
    fields = json_fields(raw.fields, raw.path)
    if raw.get("sample_from_anchor") is False:  # added by some who trained blocks of z-lab's kind
        fields |= block(raw.count("block_size"), anchor_predicts=False)
    return Layout(format=_THEIRS, path=raw.path, fields=fields)


def write(model: Drafter, folder: Path, target_folder: Path, source: Mapping[str, Any]) -> None:
    """Write a folder that DeepSpec's own model classes load, frozen copies included.

    ``source``: the config.json that the drafter came with; what it says for DeepSpec's training is
    kept.

    Raises:
        DrafterError: the drafter has something that DeepSpec's form cannot say.
    """
    config = model.config
    _check_expressible(config)
    folder.mkdir(parents=True, exist_ok=True)
    fields = read_json(target_folder / "config.json", "target config")
    fields.pop("torch_dtype", None)
    fields |= _fields(config, {"target_model_name_or_path": target_folder.name, **source})
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    tensors: dict[str, Tensor] = dict(model.state_dict())
    tensors |= {"embed_tokens.weight": model.embedding, "lm_head.weight": model.head}
    halves = {name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})


def _check_expressible(config: DrafterConfig) -> None:
    eagle3 = config.method == "eagle3"
    parts = {
        f"layers of the {config.family} family": config.family != "qwen3",
        f"{config.method} drafters": config.method not in ("dspark", "dflash", "eagle3"),
        "blocks whose anchor predicts nothing": not config.anchor_predicts,
        f"draft vocabularies (this one has {config.draft_vocab_size} tokens)": (
            config.draft_vocab_size > 0
        ),
        "injected previous feature": config.inject_previous_feature,
        "attention windows": any(config.windows),
        "head of the drafter's own": config.own_head,
        "output multiplier or soft-cap": (
            config.output_multiplier != 1.0 or config.final_logit_softcapping > 0
        ),
        f"EAGLE-3 drafters with other than {_EAGLE3_TAPS} taps": (
            eagle3 and len(config.target_layer_ids) != _EAGLE3_TAPS
        ),
    }
    if lacking := [part for part, present in parts.items() if present]:
        raise DrafterError(f"DeepSpec's form has no {lacking[0]}")


def _fields(config: DrafterConfig, source: Mapping[str, Any]) -> dict[str, Any]:
    """Those that DeepSpec sets over a copy of the target's."""
    eagle3 = config.method == "eagle3"
    fields = {
        "architectures": ["Qwen3Eagle3Model" if eagle3 else "Qwen3DSparkModel"],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers,
        "num_hidden_layers": config.num_hidden_layers,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "target_layer_ids": list(config.target_layer_ids),
    }
    training = {name: source.get(name, usual) for name, usual in _TRAINING_FIELDS.items()}
    if eagle3:
        return fields | {
            "ttt_length": config.block_size,
            "draft_num_hidden_layers": config.num_hidden_layers,
            "step_loss_decay": training["step_loss_decay"],
            "target_model_name_or_path": source["target_model_name_or_path"],
        }
    fields |= {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": training["num_anchors"],
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.enable_confidence_head,
    }
    if config.markov_rank:
        fields["markov_head_type"] = config.markov_head_type
    if config.enable_confidence_head:
        fields["confidence_head_with_markov"] = config.confidence_head_with_markov
    return fields
