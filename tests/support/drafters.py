"""Random drafters of a few thousand weights, built in memory or on a tiny target."""

from pathlib import Path
from typing import Any

import torch

from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.dspark import DSparkModel
from dspark.modeling.head import LocalHead

VOCAB, HIDDEN, DRAFT_VOCAB = 80, 32, 50


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
        "num_hidden_layers": 2,
        "block_size": 4,
        "mask_token_id": 3,
        "markov_rank": 8,
        "draft_vocab_size": DRAFT_VOCAB,
    }
    return DrafterConfig(**{**fields, **changes})


def random_model(config: DrafterConfig, seed: int = 0, scale: float = 0.3) -> DSparkModel:
    """Weights large enough that every part of the model shows in its output."""
    torch.manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    ids = None
    if config.draft_vocab_size:
        ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    model = DSparkModel(config, torch.randn(shape), scale * torch.randn(shape), ids)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return model.eval()


def model_on(target: Path, seed: int = 0, **fields: Any) -> DSparkModel:
    """A random drafter with the embedding-free parts of a target folder's shape and its head."""
    config = DrafterConfig.for_target(
        target,
        **{
            "target_layer_ids": (0, 1),
            "num_hidden_layers": 2,
            "block_size": 4,
            "mask_token_id": 0,
            "markov_rank": 8,
            **fields,
        },
    )
    torch.manual_seed(seed)
    head = LocalHead.from_folder(target, "fp32").weight
    ids = torch.arange(config.draft_vocab_size) * 2 if config.draft_vocab_size else None
    model = DSparkModel(config, torch.randn_like(head), head, ids)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()
