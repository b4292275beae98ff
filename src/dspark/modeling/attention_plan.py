"""Who attends to what in one packed step, worked out once and used by every layer.

Spans (a sequence's new tokens) of similar shape are grouped into padded rectangles. A group reads
its context in place where its sequences own evenly spaced runs of blocks, and otherwise copies it
out block by block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.modeling.kv import KVCache

_MAX_GATHER_TOKENS = 4096
"""Context tokens copied out at once: keeps a group's context in the CPU's last-level cache."""

_GROUP, _PADDED_READ, _VIEW_READ, _GATHER_READ = 2000, 0.4, 3.5, 4.2
"""Measured on a CPU, in microseconds over 30 layers of 3 KV heads: one more group, a context token
that a padded query reads, reading one in place (padding included), copying it out and reading it.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence in a step.

    blocks: the sequence's block table. start: tokens of it already in the cache. length: new ones.
    """

    blocks: Sequence[int]
    start: int
    length: int


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
    for members, spacing in _rectangles(spans, block_size, cache.shape.num_blocks):
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


_Rectangle = tuple[list[int], int | None]
"""Span indices that make a group, and their slab spacing, or None where they must be gathered."""


def _rectangles(spans: Sequence[Span], block_size: int, num_blocks: int) -> list[_Rectangle]:
    """All spans in groups that cost little to read."""
    found = list(_by_width(spans, block_size, num_blocks))
    members = [[spans[i] for i in group] for group, _ in found]
    count = np.array([len(group) for group in members])
    width = np.array([max(span.length for span in group) for group in members])
    context = np.array([max(span.start + span.length for span in group) for group in members])
    context = -(-context // block_size) * block_size
    read = np.where([spacing is None for _, spacing in found], _GATHER_READ, _VIEW_READ)
    cost = _GROUP + count * context * (read + _PADDED_READ * width)
    while len(found) > 1:  # join the two that are cheapest together, as long as there are such
        tokens = np.add.outer(count, count) * np.maximum.outer(context, context)
        together = _GROUP + tokens * (_GATHER_READ + _PADDED_READ * np.maximum.outer(width, width))
        saved = np.triu(np.add.outer(cost, cost) - together, 1)
        saved[tokens > _MAX_GATHER_TOKENS] = 0
        one, other = divmod(int(saved.argmax()), len(found))
        if saved[one, other] <= 0:
            break
        found[one] = found[one][0] + found[other][0], None
        cost[one] = together[one, other]
        for values, joint in ((count, np.add), (width, np.maximum), (context, np.maximum)):
            values[one] = joint(values[one], values[other])
        kept = np.arange(len(found)) != other
        count, width, context, cost = count[kept], width[kept], context[kept], cost[kept]
        del found[other]
    return found


def _by_width(spans: Sequence[Span], block_size: int, num_blocks: int) -> Iterator[_Rectangle]:
    """Groups of spans of about one length, in place where that is cheaper."""
    used = [-(-(span.start + span.length) // block_size) for span in spans]

    def viewed(run: list[int]) -> float:
        return _VIEW_READ * max(used[i] for i in run) * len(run) * block_size

    def gathered(run: list[int]) -> float:
        return _GATHER_READ * sum(used[i] for i in run) * block_size

    for members in _widths(spans):
        rest: list[tuple[list[int], int | None]] = []  # what is cheaper gathered, if all of it is
        for run, spacing in _slab_runs(spans, members, used, num_blocks):
            if spacing and _GROUP + viewed(run) < gathered(run):
                yield run, spacing
            else:
                rest.append((run, spacing))
        runs = [run for run, _ in rest]
        in_place = sum(_GROUP + viewed(run) for run in runs)
        if all(spacing for _, spacing in rest) and in_place < _GROUP + sum(map(gathered, runs)):
            yield from rest
        else:
            scattered = [index for run in runs for index in run]
            yield from ((group, None) for group in _by_length(scattered, used, block_size))


def _widths(spans: Sequence[Span]) -> Iterator[list[int]]:
    """Spans that are padded to the same number of queries, so that padding and groups together cost
    least. Of neighbouring lengths, because a span is cheapest with those just longer."""
    of_length: dict[int, list[int]] = {}
    for index, span in enumerate(spans):
        of_length.setdefault(span.length, []).append(index)
    lengths = sorted(of_length, reverse=True)
    tokens = [sum(spans[i].start + spans[i].length for i in of_length[n]) for n in lengths]
    best, opened = [0.0], [0]  # cost of the first n lengths, and where their last width begins
    for stop in range(1, len(lengths) + 1):
        padding, behind, width = 0.0, 0, lengths[stop - 1]
        cheapest = (float("inf"), 0)
        for start in reversed(range(stop)):
            padding += _PADDED_READ * (lengths[start] - width) * behind  # all padded up to it
            behind, width = behind + tokens[start], lengths[start]
            cheapest = min(cheapest, (best[start] + _GROUP + padding, start))
        best.append(cheapest[0])
        opened.append(cheapest[1])
    stop = len(lengths)
    while stop:
        start = opened[stop]
        yield [index for n in lengths[start:stop] for index in of_length[n]]
        stop = start


def _slab_runs(
    spans: Sequence[Span], members: list[int], used: list[int], num_blocks: int
) -> Iterator[tuple[list[int], int | None]]:
    """Split into runs of evenly spaced slabs; a span in scattered blocks comes alone, with None.

    All spans of a run are read as long as its longest: that may reach into a neighbour's blocks,
    which the mask hides, but not past the end of the cache.
    """
    run: list[int] = []
    spacing = longest = 0
    for index in sorted(members, key=lambda i: spans[i].blocks[0]):
        first = spans[index].blocks[0]
        if not _consecutive(spans[index].blocks, used[index]):
            yield [index], None
            continue
        gap = first - spans[run[-1]].blocks[0] if run else 0
        fits = gap == spacing if len(run) > 1 else gap > 0
        if run and fits and first + max(longest, used[index]) <= num_blocks:
            run.append(index)
            spacing, longest = gap, max(longest, used[index])
        else:
            if run:
                yield run, spacing
            run, spacing, longest = [index], used[index], used[index]
    if run:
        yield run, spacing


def _consecutive(blocks: Sequence[int], used: int) -> bool:
    if isinstance(blocks, range):
        return blocks.step == 1
    return bool((np.diff(blocks[:used]) == 1).all())


def _by_length(members: list[int], used: list[int], block_size: int) -> Iterator[list[int]]:
    """Groups of similar context length, longest first, so that padding stays small."""
    group: list[int] = []
    for index in sorted(members, key=lambda i: (-used[i], i)):
        if group:
            longest = used[group[0]]
            too_large = longest * block_size * (len(group) + 1) > _MAX_GATHER_TOKENS
            if too_large or longest > 1.25 * used[index] + 1:
                yield group
                group = []
        group.append(index)
    if group:
        yield group
