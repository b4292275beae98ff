"""Attention over a paged KV cache for one packed row of many sequences' tokens."""

import torch
from torch import Tensor, nn

from dspark.modeling.attention_plan import AttentionPlan, Gather, Group


def attend(
    plan: AttentionPlan, layer: int, queries: Tensor, keys_values: Tensor, scaling: float
) -> Tensor:
    """Write a layer's new keys and values, then attend to all that its rows may see.

    queries: [P, H, hd]; keys_values: [P, 2*KV, hd], the keys first. Returns [P, H*hd]. Of the P
    rows the first B are real.
    """
    num_tokens = len(plan.slots)
    plan.cache.write(layer, plan.slots, keys_values[:num_tokens])
    queries = queries[:num_tokens]
    cache = plan.cache.layers[layer]
    outputs = [_attend(group, queries, cache, scaling) for group in plan.groups]
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed if plan.restore is None else packed.index_select(0, plan.restore)


def _attend(group: Group, queries: Tensor, cache: Tensor, scaling: float) -> Tensor:
    """queries: [B, H, hd]; cache: [2*KV, blocks, block_size, hd]. Returns [R*Q, H*hd]."""
    heads, head_dim = queries.shape[1:]
    kv_heads, count = cache.shape[0] // 2, group.num_spans
    share = heads // kv_heads  # query heads that read one KV head become rows of one product
    rows = queries if group.rows is None else queries.index_select(0, group.rows)
    rows = rows.view(count, -1, kv_heads, share, head_dim)
    keys, values = _context(group, cache)
    mixed = nn.functional.scaled_dot_product_attention(
        rows.transpose(1, 2).flatten(2, 3), keys, values, attn_mask=group.mask, scale=scaling
    )
    mixed = mixed.view(count, kv_heads, -1, share, head_dim).transpose(1, 2)
    return mixed.reshape(-1, heads * head_dim)


def _context(group: Group, cache: Tensor) -> tuple[Tensor, ...]:
    """[2*KV, blocks, block_size, hd] -> keys and values, [R, KV, N*block_size, hd] each; in place
    where they can be."""
    kv_heads, (_, _, block_size, head_dim) = cache.shape[0] // 2, cache.shape
    context = group.context
    if isinstance(context, Gather):
        # Along the first of two dimensions, which is twice as fast as along the second of four.
        gathered = cache.view(-1, block_size * head_dim).index_select(0, context.rows)
        return gathered.view(2, group.num_spans, kv_heads, -1, head_dim).unbind(0)
    block = block_size * head_dim
    return cache.as_strided(
        (2, group.num_spans, kv_heads, context.num_blocks * block_size, head_dim),
        (kv_heads * cache.stride(0), context.spacing * block, cache.stride(0), head_dim, 1),
        context.first_block * block,
    ).unbind(0)
