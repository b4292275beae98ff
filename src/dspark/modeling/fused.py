"""Attention and MLP of a transformers decoder in fewer, larger operations.

At one row a layer costs its weights' way through memory plus the launch of every operation, and
the second is not small on a CPU: three projections are one product here, as are gate and up, and
queries and keys are rotated together.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RotaryEmbedding,
)

from dspark.modeling.attention import attend
from dspark.modeling.attention_plan import AttentionPlan


class FusedAttention(nn.Module):
    """Takes the place of LlamaAttention and Qwen3Attention, for one packed row of tokens."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.layer_idx = attention.layer_idx
        self.scaling = attention.scaling
        self._head_dim = attention.head_dim
        self._num_queries = attention.q_proj.out_features // attention.head_dim
        self._num_keys = attention.k_proj.out_features // attention.head_dim
        self.qkv_proj = _side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = attention.o_proj
        self.q_norm = getattr(attention, "q_norm", None)  # Qwen3 has them
        self.k_norm = getattr(attention, "k_norm", None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        plan: AttentionPlan,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """hidden_states: [1, B, d]; position_embeddings: of `FusedRotary`. Returns [1, B, d]."""
        heads = self.qkv_proj(hidden_states[0]).view(hidden_states.shape[1], -1, self._head_dim)
        queries, keys_values = heads[:, : self._num_queries], heads[:, self._num_queries :]
        turning = heads[:, : self._num_queries + self._num_keys]
        if self.q_norm is not None and self.k_norm is not None:
            keys = keys_values[:, : self._num_keys]
            turned = torch.cat((self.q_norm(queries), self.k_norm(keys)), dim=1)
            rotate(turned, *position_embeddings, out=turning)
        else:
            rotate(turning, *position_embeddings, out=turning)
        mixed = attend(plan, self.layer_idx, queries, keys_values, self.scaling)
        return self.o_proj(mixed).unsqueeze(0), None


class FusedMLP(nn.Module):
    """Takes the place of LlamaMLP and Qwen3MLP."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj = _side_by_side(mlp.gate_proj, mlp.up_proj)
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return cast(Tensor, self.down_proj(self.act_fn(gate).mul_(up)))


class FusedRotary(nn.Module):
    """A transformers rotary embedding, laid out once a step for `rotate`."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids: [1, B]. Returns cos and signed sin, [B, 1, head_dim] each."""
        cos, sin = (each.squeeze(0).unsqueeze(1) for each in self.rotary(x, position_ids))
        first, second = sin.chunk(2, dim=-1)
        return cos, torch.cat((-first, second), dim=-1)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor, out: Tensor) -> None:
    """Rotary embedding of [B, H, head_dim] into ``out``, which may be ``heads`` itself; the sign
    of `rotate_half` is in ``signed_sin``."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    torch.addcmul(heads * cos, swapped, signed_sin, out=out)


def fuse(model: nn.Module) -> None:
    """Swap what can be fused in a transformers decoder of a supported family, in place."""
    replacements = (
        (LlamaAttention | Qwen3Attention, FusedAttention),
        (LlamaMLP | Qwen3MLP, FusedMLP),
        (LlamaRotaryEmbedding | Qwen3RotaryEmbedding, FusedRotary),
    )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            for kind, fused in replacements:
                if isinstance(child, kind):
                    setattr(parent, name, fused(child))


def _side_by_side(*linears: nn.Linear) -> nn.Linear:
    """One linear whose output is the given ones' outputs, end to end."""
    weight = torch.cat([linear.weight for linear in linears])
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    with torch.device("meta"):
        joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases))
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined
