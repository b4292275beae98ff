"""Who attends to what in one packed step, worked out once and used by every layer.

Spans of similar shape are grouped into padded rectangles. A group reads its context in place where
its sequences own evenly spaced runs of blocks, and otherwise copies it out block by block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.modeling.attention_groups import Span, rectangles
from dspark.modeling.kv import KVCache


@dataclass(frozen=True, slots=True)
class Gather:
    """Context to copy out: every head's part of every block, one after the other."""

    rows: Tensor  # [2*R*KV*N] of a layer's cache seen as [2*KV*num_blocks, block_size*hd], all keys
    # before all values; padding repeats a span's last block


@dataclass(frozen=True, slots=True)
class Slabs:
    """Context to read in place: consecutive blocks for each span, spans evenly spaced."""

    first_block: int
    spacing: int  # blocks from one span's first block to the next one's
    num_blocks: int  # N


@dataclass(frozen=True, slots=True)
class Group:
    """Spans of similar shape, padded to one rectangle: R spans, Q queries, N blocks of context."""

    rows: Tensor | None  # [R*Q] packed row of every query; padding repeats the span's last row.
    # None: the packed rows are the queries
    context: Gather | Slabs
    num_spans: int
    mask: Tensor | None  # [R, 1, Q*share, N*block_size], 0 or -inf; None if nothing is masked


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything a layer needs to attend in this step, and the cache it works on."""

    cache: KVCache
    slots: Tensor  # [B] cache slot of every packed row
    positions: Tensor  # [P] position of every packed row in its sequence, 0 of the padding
    groups: tuple[Group, ...]
    restore: Tensor | None  # [P] where a packed row's output lies in the groups' concatenated
    # outputs; None: at its own place


def plan_attention(
    spans: Sequence[Span], cache: KVCache, share: int, num_rows: int
) -> AttentionPlan:
    """Group the spans and build the index tensors of a step. Rows are in span order.

    ``share``: query heads that read one KV head. ``num_rows``: P >= B, the spans' rows and padding
    behind them, which is neither kept nor attended to and gets the output of some other row.
    """
    device = cache.device
    block_size = cache.shape.block_size
    first_row = np.cumsum([0, *(span.length for span in spans)])
    positions = np.zeros(num_rows, np.int64)
    slots = np.empty(first_row[-1], np.int64)
    for span, first in zip(spans, first_row, strict=False):
        own = np.arange(span.start, span.start + span.length)
        positions[first : first + span.length] = own
        blocks = np.asarray(span.blocks)[own // block_size]
        slots[first : first + span.length] = blocks * block_size + own % block_size
    groups, restore, offset = [], np.zeros_like(positions), 0
    for members, spacing in rectangles(spans, block_size, cache.shape.num_blocks):
        width = max(spans[i].length for i in members)
        chosen = [spans[i] for i in members]
        first_rows = first_row[members]
        groups.append(_build_group(chosen, first_rows, first_row[-1], spacing, cache, share))
        for place, index in enumerate(members):
            length = spans[index].length
            first = first_row[index]
            restore[first : first + length] = offset + place * width + np.arange(length)
        offset += len(members) * width
    return AttentionPlan(
        cache=cache,
        slots=torch.from_numpy(slots).to(device),
        positions=torch.from_numpy(positions).to(device),
        groups=tuple(groups),
        restore=_unless_identity(restore, offset, device),
    )


def _build_group(
    spans: list[Span],
    first_rows: NDArray[np.int64],
    num_rows: int,
    spacing: int | None,
    cache: KVCache,
    share: int,
) -> Group:
    device, block_size = cache.device, cache.shape.block_size
    starts = np.array([span.start for span in spans])
    lengths = np.array([span.length for span in spans])
    num_blocks = -(-int((starts + lengths).max()) // block_size)
    query = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)  # [R, Q]
    visible = np.arange(num_blocks * block_size) <= (starts[:, None] + query)[..., None]
    bias = np.where(visible.repeat(share, axis=1), np.float32(0), np.float32(-np.inf))[:, None]
    context: Gather | Slabs
    if spacing is None:
        tables = np.empty((len(spans), num_blocks), dtype=np.int64)
        for row, span in zip(tables, spans, strict=True):
            table = span.blocks[:num_blocks]
            row[: len(table)] = table
            row[len(table) :] = table[-1]
        heads = np.arange(2 * cache.shape.kv_heads).reshape(2, 1, -1, 1) * cache.shape.num_blocks
        context = Gather(torch.from_numpy((heads + tables[:, None]).reshape(-1)).to(device))
    else:
        context = Slabs(spans[0].blocks[0], spacing, num_blocks)
    return Group(
        rows=_unless_identity((first_rows[:, None] + query).reshape(-1), num_rows, device),
        context=context,
        num_spans=len(spans),
        mask=None if visible.all() else torch.from_numpy(bias).to(device, cache.dtype),
    )


def _unless_identity(index: NDArray[np.int64], size: int, device: torch.device) -> Tensor | None:
    """``index`` as a tensor; None if selecting by it from ``size`` rows changes nothing."""
    if len(index) == size and (index == np.arange(size)).all():
        return None
    return torch.from_numpy(index).to(device)
