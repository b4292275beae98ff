"""The layers of a Llama- or Qwen3-family target as one plain loop over packed rows.

At one row a step on a CPU costs its weights' way through memory, and then as much again for
launching operations and for walking through modules. So the loop is written out here, with few and
large operations: query, key and value are one product, so are gate and up, and queries and keys are
rotated together, in place. transformers loads the checkpoint and computes the rotary angles.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dspark.modeling.attention import attend
from dspark.modeling.attention_plan import AttentionPlan
from dspark.modeling.linear import Precision, RowFunction, linear_function, rms_norm

Rope = tuple[Tensor, Tensor]
"""cos and signed sin, [B, 1, head_dim] each."""


class PackedDecoder:
    """Takes over the weights of a transformers decoder (``LlamaModel``, ``Qwen3Model``)."""

    def __init__(self, model: Any, precision: Precision, tap_layers: Sequence[int]) -> None:
        """``tap_layers``: whose outputs are wanted besides the last."""
        self._embedding = model.embed_tokens.weight
        self._rotary = model.rotary_emb
        self._layers = [_Layer(i, layer, precision) for i, layer in enumerate(model.layers)]
        self._norm = _norm(model.norm)
        self._tap_layers = tuple(tap_layers)

    def __call__(self, token_ids: Tensor, plan: AttentionPlan) -> tuple[Tensor, list[Tensor]]:
        """token_ids: [B]. Returns the final hidden states [B, d], normed, and the taps [B, d]."""
        rows = nn.functional.embedding(token_ids, self._embedding)
        rope = self._rope(rows, plan.positions)
        tapped = {}
        for index, layer in enumerate(self._layers):
            rows = layer(rows, rope, plan)
            if index in self._tap_layers:
                tapped[index] = rows
        return self._norm(rows), [tapped[layer] for layer in self._tap_layers]

    def _rope(self, rows: Tensor, positions: Tensor) -> Rope:
        cos, sin = (each[0].unsqueeze(1) for each in self._rotary(rows, positions[None]))
        first, second = sin.chunk(2, dim=-1)
        return cos, torch.cat((-first, second), dim=-1)


class _Layer:
    def __init__(self, index: int, layer: Any, precision: Precision) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._head_dim = attention.head_dim
        self._num_queries = attention.q_proj.out_features // attention.head_dim
        self._num_keys = attention.k_proj.out_features // attention.head_dim
        self._scaling = attention.scaling
        self._attention_norm = _norm(layer.input_layernorm)
        self._qkv = product((attention.q_proj, attention.k_proj, attention.v_proj), precision)
        self._head_norms = (  # Qwen3 has them
            (_norm(attention.q_norm), _norm(attention.k_norm))
            if hasattr(attention, "q_norm")
            else None
        )
        self._out = product((attention.o_proj,), precision)
        self._mlp_norm = _norm(layer.post_attention_layernorm)
        self._gate_up = product((mlp.gate_proj, mlp.up_proj), precision)
        self._activation = mlp.act_fn
        self._down = product((mlp.down_proj,), precision)

    def __call__(self, rows: Tensor, rope: Rope, plan: AttentionPlan) -> Tensor:
        """rows: [B, d]. Writes its keys and values to the plan's cache. Returns [B, d]."""
        heads = self._qkv(self._attention_norm(rows)).view(len(rows), -1, self._head_dim)
        queries, keys_values = heads[:, : self._num_queries], heads[:, self._num_queries :]
        turning = turned = heads[:, : self._num_queries + self._num_keys]
        if self._head_norms is not None:
            of_queries, of_keys = self._head_norms
            keys = keys_values[:, : self._num_keys]
            turned = torch.cat((of_queries(queries), of_keys(keys)), dim=1)
        rotate(turned, *rope, out=turning)
        mixed = attend(plan, self._index, queries, keys_values, self._scaling)
        rows = rows + self._out(mixed)
        gate, up = self._gate_up(self._mlp_norm(rows)).chunk(2, dim=-1)
        return rows + self._down(self._activation(gate).mul_(up))


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor, out: Tensor) -> None:
    """Rotary embedding of [B, H, head_dim] into ``out``, which may be ``heads`` itself; the sign
    of `rotate_half` is in ``signed_sin``."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    torch.addcmul(heads * cos, swapped, signed_sin, out=out)


def _norm(module: Any) -> RowFunction:
    return rms_norm(module.weight, module.variance_epsilon)


def product(linears: Sequence[Any], precision: Precision) -> RowFunction:
    """One product whose output is the outputs of ``linears``, end to end."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return linear_function(weight, torch.cat(biases) if biases else None, precision)
