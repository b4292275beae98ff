"""Attention over a paged KV cache for one packed row of many sequences' tokens.

Registered with transformers under ``dspark_paged``: any model whose attention goes through
``AttentionInterface`` runs unchanged, given the step's ``plan`` as a keyword.
"""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from dspark.modeling.attention_plan import AttentionPlan, Gather, Group

ATTENTION_NAME = "dspark_paged"


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    plan: AttentionPlan,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The function transformers calls; it writes the cache, then attends to it.

    query: [1, H, B, hd]; key, value: [1, KV, B, hd]. Returns [1, B, H, hd].
    """
    del attention_mask, kwargs  # causality and padding are in the plan
    layer = module.layer_idx
    assert isinstance(layer, int)
    plan.cache.write(layer, plan.slots, key[0], value[0])
    keys, values = plan.cache.keys[layer], plan.cache.values[layer]
    rows = query[0].transpose(0, 1)
    outputs = [_attend(group, rows, keys, values, scaling) for group in plan.groups]
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return packed.index_select(0, plan.restore).unsqueeze(0), None


def _attend(group: Group, rows: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """rows: [B, H, hd]; keys, values: [KV, blocks, block_size, hd]. Returns [R*Q, H, hd]."""
    heads, head_dim = rows.shape[1:]
    kv_heads, count = keys.shape[0], group.num_spans
    share = heads // kv_heads  # query heads that read one KV head become rows of one product
    queries = rows.index_select(0, group.rows).view(count, -1, kv_heads, share, head_dim)
    mixed = nn.functional.scaled_dot_product_attention(
        queries.transpose(1, 2).flatten(2, 3),
        _context(group, keys),
        _context(group, values),
        attn_mask=group.mask,
        scale=scaling,
    )
    mixed = mixed.view(count, kv_heads, -1, share, head_dim).transpose(1, 2)
    return mixed.reshape(-1, heads, head_dim)


def _context(group: Group, cache: Tensor) -> Tensor:
    """[KV, blocks, block_size, hd] -> [R, KV, N*block_size, hd]; in place where it can be."""
    kv_heads, _, block_size, head_dim = cache.shape
    context = group.context
    if isinstance(context, Gather):
        gathered = cache.index_select(1, context.blocks)
        return gathered.view(kv_heads, group.num_spans, -1, head_dim).transpose(0, 1)
    block = block_size * head_dim
    return cache.as_strided(
        (group.num_spans, kv_heads, context.num_blocks * block_size, head_dim),
        (context.spacing * block, cache.stride(0), head_dim, 1),
        context.first_block * block,
    )


AttentionInterface.register(ATTENTION_NAME, paged_attention)
