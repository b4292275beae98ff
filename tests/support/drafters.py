"""Random drafters of a few thousand weights, built in memory or on a tiny target."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.families import new_drafter
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.drafters.shared import SharedDraftParts
from dspark.modeling.head import LocalHead

VOCAB, HIDDEN, DRAFT_VOCAB = 80, 32, 50


METHODS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "dflash": {"method": "dflash"},
    "dflash-own-place": {"method": "dflash", "anchor_predicts": False},
    "dflash2": {"method": "dflash2", "anchor_predicts": False, "conv_group_size": 8},
    "eagle3": {"method": "eagle3"},
    "mtp1": {"method": "mtp1"},
    "dflash2-capped": {  # as some of the published ones are
        "method": "dflash2",
        "anchor_predicts": False,
        "conv_group_size": 8,
        "layer_windows": (9, 0),
        "output_multiplier": 0.6,
        "final_logit_softcapping": 8.0,
        "selector_top_k": 8,
    },
    "eagle3-own-head": {"method": "eagle3", "own_head": True},
}
"""What makes each kind of drafter."""

TRAINED = tuple(kind for kind in METHODS if kind not in ("dflash2-capped", "eagle3-own-head"))
"""Those that are also trained here."""


def method_fields(**changes: Any) -> dict[str, Any]:
    """The fields of a small drafter that depend on its method."""
    method = changes.get("method", "dspark")
    chain = method in ("eagle3", "mtp1")
    return {
        "num_hidden_layers": 1 if chain else 2,
        "block_size": 1 if method == "mtp1" else 4,
        "markov_rank": 8 if method in ("dspark", "dflash2") else 0,
        "enable_confidence_head": method == "dspark",
        **changes,
    }


def random_config(**changes: Any) -> DrafterConfig:
    """d=32, two layers, blocks of four, a draft vocabulary of 50 of 80 tokens."""
    fields: dict[str, Any] = {
        "family": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "num_target_layers": 4,
        "target_layer_ids": (0, 2),
        "mask_token_id": 3,
        "draft_vocab_size": DRAFT_VOCAB,
    }
    return DrafterConfig(**{**fields, **method_fields(**changes)})


def block_logits(parts: Drafter | SharedDraftParts, hidden: Tensor, previous: Tensor) -> Tensor:
    """Draft logits [K, U] of one block. hidden: [K, d]; previous: [K] tokens before each."""
    vectors = parts.sequential_head.vectors(hidden[None], previous[None])[0]
    return parts.sequential_head.combine(parts.base_logits(hidden), vectors)


def prefixes(rows: Tensor) -> list[Tensor]:
    """rows: [K, ...] -> those up to each of the K."""
    return [rows[: k + 1] for k in range(len(rows))]


def random_model(config: DrafterConfig, seed: int = 0, scale: float = 0.3) -> Drafter:
    """Weights large enough that every part of the model shows in its output."""
    torch.manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    ids = None
    if config.draft_vocab_size:
        ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    model = new_drafter(config, torch.randn(shape), scale * torch.randn(shape), ids)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return model.eval()


def model_on(target: Path, seed: int = 0, **fields: Any) -> Drafter:
    """A random drafter with the embedding-free parts of a target folder's shape and its head."""
    config = DrafterConfig.for_target(
        target,
        **{
            "target_layer_ids": (0, 1),
            "mask_token_id": 0,
            **method_fields(**fields),
        },
    )
    torch.manual_seed(seed)
    head = LocalHead.from_folder(target, "fp32").weight
    ids = torch.arange(config.draft_vocab_size) * 2 if config.draft_vocab_size else None
    model = new_drafter(config, torch.randn_like(head), head, ids)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()
