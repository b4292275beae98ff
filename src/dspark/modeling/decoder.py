"""The layers of a Llama- or Qwen3-family target as one plain loop over packed rows.

transformers loads the checkpoint and computes the rotary angles; its modules do not run.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from dspark.modeling.attention import attend
from dspark.modeling.attention_plan import AttentionPlan
from dspark.modeling.fused import FusedLayer, norm_function, signed_rope
from dspark.modeling.linear import Precision


class PackedDecoder:
    """Takes over the weights of a transformers decoder (``LlamaModel``, ``Qwen3Model``)."""

    def __init__(self, model: Any, precision: Precision, tap_layers: Sequence[int]) -> None:
        """``tap_layers``: whose outputs are wanted besides the last."""
        self._embedding = model.embed_tokens.weight
        self._rotary = model.rotary_emb
        self._layers = [FusedLayer(layer, precision, layer.mlp.act_fn) for layer in model.layers]
        self._scaling = model.layers[0].self_attn.scaling
        self._norm = norm_function(model.norm)
        self._tap_layers = tuple(tap_layers)

    def __call__(self, token_ids: Tensor, plan: AttentionPlan) -> tuple[Tensor, list[Tensor]]:
        """token_ids: [B]. Writes their keys and values to the plan's cache. Returns the final
        hidden states [B, d], normed, and the taps [B, d]."""
        num_tokens = len(token_ids)
        token_ids = nn.functional.pad(token_ids, (0, len(plan.positions) - num_tokens))
        rows = nn.functional.embedding(token_ids, self._embedding)
        cos, sin = self._rotary(rows, plan.positions[None])
        rope = signed_rope(cos[0], sin[0])
        tapped = {}
        for index, layer in enumerate(self._layers):
            rows = layer(rows, rope, partial(attend, plan, index, scaling=self._scaling))
            if index in self._tap_layers:
                tapped[index] = rows[:num_tokens]
        return self._norm(rows[:num_tokens]), [tapped[layer] for layer in self._tap_layers]
