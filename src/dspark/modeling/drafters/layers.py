"""One draft layer, as it trains. Where its keys and values come from is the caller's affair.

Serving runs the same weights through `dspark.modeling.fused`; tests hold the two together.
"""

from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from dspark.modeling.drafters.config import DrafterConfig

Rope: TypeAlias = tuple[Tensor, Tensor]
"""cos and sin, [N, head_dim] each, of N absolute positions."""

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""queries [H, N, hd], keys and values [KVH, N, hd] of the block rows -> [N, H * hd]."""


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Grouped-query attention. queries: [H, Nq, hd]; keys, values: [KVH, Nk, hd];
    visible: [Nq, Nk] bool. Returns [Nq, H * hd]."""
    num_heads, num_queries, head_dim = queries.shape
    num_kv_heads = keys.shape[0]
    # The queries that share a key-value head become rows of one product: keys are read once.
    rows = queries.reshape(num_kv_heads, -1, head_dim)
    scores = torch.bmm(rows, keys.transpose(1, 2)) * head_dim**-0.5
    by_head = scores.view(num_heads, num_queries, -1)
    scores = by_head.masked_fill(~visible, float("-inf")).view_as(scores)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    out = torch.bmm(weights, values).view(num_heads, num_queries, head_dim)
    return out.transpose(0, 1).reshape(num_queries, -1)


def in_window(queries: Tensor, keys: Tensor, window: int, causal: bool) -> Tensor:
    """Which keys, at positions [Nk], the rows at positions [Nq] see: [Nq, Nk] bool. ``window``
    positions on either side of its own, that included; of those after it none, if causal."""
    ahead = keys - queries[:, None]
    return (ahead > -window) & (ahead < (1 if causal else window))


class DraftAttention(nn.Module):
    """Projections of a draft layer; context rows and block rows share W_k and W_v."""

    def __init__(self, config: DrafterConfig, in_width: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(in_width, query_width, bias=False)
        self.k_proj = nn.Linear(in_width, kv_width, bias=False)
        self.v_proj = nn.Linear(in_width, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm: nn.Module = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm: nn.Module = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def queries(self, rows: Tensor, rope: Rope) -> Tensor:
        """rows: [N, in width], normed. Returns [H, N, hd], rotated."""
        return _rotate(self.q_norm(self._split(self.q_proj(rows))), rope)

    def keys_values(self, rows: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """rows: [N, d], fused features or normed block rows. Returns two [KVH, N, hd]."""
        keys = _rotate(self.k_norm(self._split(self.k_proj(rows))), rope)
        return keys, self._split(self.v_proj(rows))

    def _split(self, rows: Tensor) -> Tensor:
        return rows.view(rows.shape[0], -1, self.head_dim).transpose(0, 1)


class DraftMLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        gate = nn.functional.silu(self.gate_proj(rows))
        return cast(Tensor, self.down_proj(gate * self.up_proj(rows)))


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig, in_width: int | None = None) -> None:
        """``in_width``: of what attention reads; the hidden size, if not given."""
        super().__init__()
        self.self_attn = DraftAttention(config, in_width or config.hidden_size)
        self.mlp = DraftMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, rows: Tensor, rope: Rope, attend_rows: Attend) -> Tensor:
        """rows: [N, d]. Returns the same shape."""
        rows = rows + self.attention(self.input_layernorm(rows), rope, attend_rows)
        return cast(Tensor, rows + self.mlp(self.post_attention_layernorm(rows)))

    def attention(self, normed: Tensor, rope: Rope, attend_rows: Attend) -> Tensor:
        """normed: [N, in width]. Returns [N, d]."""
        keys, values = self.self_attn.keys_values(normed, rope)
        mixed = attend_rows(self.self_attn.queries(normed, rope), keys, values)
        return cast(Tensor, self.self_attn.o_proj(mixed))


class RotaryEmbedding(nn.Module):
    """cos and sin of absolute positions, by the target's own RoPE parameters."""

    inverse_frequencies: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        # Qwen3 rotates as Llama does; transformers knows every scaling rule of the two.
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.head_dim,  # one head: RoPE depends on nothing else
                num_attention_heads=1,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )
        self.scaling = float(rotary.attention_scaling)
        self.register_buffer("inverse_frequencies", rotary.inv_freq.float(), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """positions: [N] int64. Returns cos and sin, [N, head_dim] each."""
        angles = positions[:, None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def _rotate(heads: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
