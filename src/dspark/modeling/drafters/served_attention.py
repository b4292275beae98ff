"""Attention of served drafters: each sequence's rows over its own context."""

import torch
from torch import Tensor


def attend_context(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None = None
) -> Tensor:
    """One sequence's rows to its keys. queries: [H, N, hd]; keys, values: [KVH, L, hd]; visible:
    [N, L] bool, or None where every row sees all. Returns [N, H * hd].

    Not by matrix products, although they are as exact: L grows with every step, and oneDNN compiles
    a bf16 product anew for each shape, which takes longer than the layer.
    """
    num_heads, num_rows, head_dim = queries.shape
    shared_by = num_heads // len(keys)
    rows = queries.reshape(1, len(keys), -1, head_dim)  # that share a key-value head: one product
    mask = None if visible is None else visible.repeat(shared_by, 1)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        rows, keys[None], values[None], attn_mask=mask
    )
    return mixed.view(num_heads, num_rows, head_dim).transpose(0, 1).reshape(num_rows, -1)


def by_head(keys_values: Tensor) -> tuple[Tensor, ...]:
    """[N, 2*KVH, hd], keys before values -> two [KVH, N, hd]."""
    return keys_values.transpose(0, 1).chunk(2)
