"""A Llama- or Qwen3-shaped layer for inference, in few and large operations.

At one row a step on a CPU costs its weights' way through memory, and then as much again for
launching operations and for walking through modules. So query, key and value are one product here,
so are gate and up, and queries and keys are rotated together, in place. Target and drafter both run
this code; what their rows attend to is the caller's affair.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dspark.modeling.linear import Precision, RowFunction, linear_function, rms_norm

SignedRope = tuple[Tensor, Tensor]
"""cos and signed sin, [B, 1, head_dim] each."""

AttendRows = Callable[[Tensor, Tensor], Tensor]
"""queries [B, H, hd], keys before values [B, 2*KV, hd] -> [B, H*hd]."""


class FusedLayer:
    """Takes over the weights of a layer with `self_attn`, `mlp` and their two norms."""

    def __init__(self, layer: Any, precision: Precision, activation: RowFunction) -> None:
        """``activation``: of the MLP's gate."""
        attention, mlp = layer.self_attn, layer.mlp
        self._head_dim = attention.head_dim
        self._num_queries = attention.q_proj.out_features // attention.head_dim
        self._num_keys = attention.k_proj.out_features // attention.head_dim
        self.attention_norm = norm_function(layer.input_layernorm)
        self._qkv = product((attention.q_proj, attention.k_proj, attention.v_proj), precision)
        self._query_norm, self._key_norm = (
            _head_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")
        )
        self._out = product((attention.o_proj,), precision)
        self.mlp_norm = norm_function(layer.post_attention_layernorm)
        self._gate_up = product((mlp.gate_proj, mlp.up_proj), precision)
        self._activation = activation
        self._down = product((mlp.down_proj,), precision)

    def __call__(self, rows: Tensor, rope: SignedRope, attend: AttendRows) -> Tensor:
        """rows: [B, d]. Returns [B, d]."""
        rows = rows + self.attention(self.attention_norm(rows), rope, attend)
        return rows + self.mlp(self.mlp_norm(rows))

    def attention(self, normed: Tensor, rope: SignedRope, attend: AttendRows) -> Tensor:
        """normed: what query, key and value are made from, [B, in width]. Returns [B, d]."""
        heads = self._qkv(normed).view(len(normed), -1, self._head_dim)
        queries, keys_values = heads[:, : self._num_queries], heads[:, self._num_queries :]
        turning = turned = heads[:, : self._num_queries + self._num_keys]
        if self._query_norm is not None and self._key_norm is not None:
            keys = keys_values[:, : self._num_keys]
            turned = torch.cat((self._query_norm(queries), self._key_norm(keys)), dim=1)
        rotate(turned, *rope, out=turning)
        return self._out(attend(queries, keys_values))

    def mlp(self, normed: Tensor) -> Tensor:
        """[B, d] -> [B, d]."""
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        return self._down(self._activation(gate).mul_(up))


def signed_rope(cos: Tensor, sin: Tensor) -> SignedRope:
    """cos and sin [B, head_dim], of `rotate_half`, as `rotate` takes them."""
    first, second = sin.unsqueeze(1).chunk(2, dim=-1)
    return cos.unsqueeze(1), torch.cat((-first, second), dim=-1)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor, out: Tensor) -> None:
    """Rotary embedding of [B, H, head_dim] into ``out``, which may be ``heads`` itself; the sign
    of `rotate_half` is in ``signed_sin``."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    torch.addcmul(heads * cos, swapped, signed_sin, out=out)


def product(linears: Sequence[Any], precision: Precision) -> RowFunction:
    """One product whose output is the outputs of ``linears``, end to end."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return linear_function(weight, torch.cat(biases) if biases else None, precision)


def norm_function(norm: Any) -> RowFunction:
    """An RMS norm of torch or of transformers, which name their epsilon differently."""
    eps = norm.eps if isinstance(norm, nn.RMSNorm) else norm.variance_epsilon
    assert eps is not None, "drafters and targets name their epsilon"
    return rms_norm(norm.weight, eps)


def _head_norm(norm: Any) -> RowFunction | None:
    """None where the family norms no heads."""
    return None if norm is None or isinstance(norm, nn.Identity) else norm_function(norm)
