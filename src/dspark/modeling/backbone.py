"""The target without its head: packed tokens in, final and tapped hidden states out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from dspark.core.errors import TargetError
from dspark.modeling.attention_groups import Span
from dspark.modeling.attention_plan import plan_attention
from dspark.modeling.decoder import PackedDecoder
from dspark.modeling.kv import KVCache, KVShape
from dspark.modeling.linear import (
    Precision,
    activation_dtype,
    packs_bf16,
    padded_rows,
)

__all__ = ["Backbone", "BackboneOutput", "LocalBackbone", "PackedStep", "Span"]


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One target forward: every sequence's new tokens in one row, no padding."""

    token_ids: Tensor  # [B] int64, rows in span order
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class BackboneOutput:
    hidden: Tensor  # [B, d] after the final norm
    taps: Tensor  # [B, n*d] outputs of the n tapped decoder layers, side by side


class Backbone(Protocol):
    """What the verifier needs of a target, wherever it runs."""

    config: PretrainedConfig
    kv: KVCache

    def forward(self, step: PackedStep) -> BackboneOutput: ...


class LocalBackbone:
    """A decoder on one device, run over a paged KV cache."""

    def __init__(
        self,
        folder: Path,
        precision: Precision,
        tap_layers: Sequence[int],
        num_blocks: int,
        block_size: int = 16,
        threads: int | None = None,
        feature_dim: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """Load the checkpoint in ``folder``.

        ``tap_layers`` are 0-based decoder layers. ``threads`` sets torch's own global count.
        ``feature_dim`` > 0 keeps room for one fused feature a token beside the keys and values.
        ``device``: the CPU, if not given.

        Raises:
            TargetError: the checkpoint cannot be loaded, or a tapped layer does not exist.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self.precision = precision
        self.config, model = _load_decoder(folder, activation_dtype(precision))
        self.tap_layers = tuple(tap_layers)
        num_layers = self.config.num_hidden_layers
        if not all(0 <= layer < num_layers for layer in self.tap_layers):
            raise TargetError(f"tap layers {self.tap_layers} are not all in 0..{num_layers - 1}")
        self.device = device or torch.device("cpu")
        self._decoder = PackedDecoder(model.to(self.device), precision, self.tap_layers)
        shape = KVShape(
            num_layers=num_layers,
            kv_heads=self.config.num_key_value_heads,
            head_dim=getattr(self.config, "head_dim", None)
            or self.config.hidden_size // self.config.num_attention_heads,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        self._share = self.config.num_attention_heads // shape.kv_heads
        self.kv = KVCache(shape, activation_dtype(precision), self.device, feature_dim)
        self._pads = packs_bf16(precision, self.device)

    def forward(self, step: PackedStep) -> BackboneOutput:
        """Run one packed step: writes its keys and values, returns its hidden states."""
        num_rows = len(step.token_ids)
        if self._pads:
            num_rows = padded_rows(num_rows)
        plan = plan_attention(step.spans, self.kv, self._share, num_rows)
        with torch.inference_mode():
            hidden, taps = self._decoder(step.token_ids.to(self.device), plan)
            return BackboneOutput(
                hidden=hidden, taps=torch.cat(taps, dim=-1) if taps else hidden[:, :0]
            )


def _load_decoder(folder: Path, dtype: torch.dtype) -> tuple[PretrainedConfig, nn.Module]:
    """The checkpoint's configuration and decoder; the head is a module of its own (`LocalHead`)."""
    loaded: Any  # (model, report), which the annotations of transformers do not say
    try:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TargetError(f"the target in {folder} cannot be loaded: {error}") from error
    model, report = loaded
    if report["missing_keys"]:  # transformers would go on with random weights
        raise TargetError(f"the target in {folder} lacks {sorted(report['missing_keys'])}")
    return model.config, model.base_model.eval()
