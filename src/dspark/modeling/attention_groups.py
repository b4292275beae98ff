"""Which spans of a step attention reads as one padded rectangle, so that groups, padding and the
copying of contexts together cost little."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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


class Rectangle(NamedTuple):
    """Spans, by index, that are padded to the longest of them and to the longest context."""

    members: list[int]
    spacing: int | None  # blocks between the first blocks of neighbours, which are read in place;
    # None: their contexts are copied out


def rectangles(spans: Sequence[Span], block_size: int, num_blocks: int) -> list[Rectangle]:
    """All spans, each in one rectangle. num_blocks: of the cache."""
    used = [-(-(span.start + span.length) // block_size) for span in spans]  # blocks of each
    found = list(_by_width(spans, used, block_size, num_blocks))
    return found if len(found) == 1 else _joined(found, spans, used, block_size)


def _joined(
    found: list[Rectangle], spans: Sequence[Span], used: list[int], block_size: int
) -> list[Rectangle]:
    """As long as two of them cost less together, the two that gain most are made one."""
    count = np.array([len(rectangle.members) for rectangle in found])
    width = np.array([max(spans[i].length for i in rectangle.members) for rectangle in found])
    context = np.array([max(used[i] for i in rectangle.members) for rectangle in found])
    context *= block_size
    read = np.where([rectangle.spacing is None for rectangle in found], _GATHER_READ, _VIEW_READ)
    cost = _GROUP + count * context * (read + _PADDED_READ * width)
    while len(found) > 1:
        tokens = np.add.outer(count, count) * np.maximum.outer(context, context)
        together = _GROUP + tokens * (_GATHER_READ + _PADDED_READ * np.maximum.outer(width, width))
        saved = np.triu(np.add.outer(cost, cost) - together, 1)
        saved[tokens > _MAX_GATHER_TOKENS] = 0
        one, other = divmod(int(saved.argmax()), len(found))
        if saved[one, other] <= 0:
            break
        found[one] = Rectangle(found[one].members + found[other].members, None)
        cost[one] = together[one, other]
        for values, joint in ((count, np.add), (width, np.maximum), (context, np.maximum)):
            values[one] = joint(values[one], values[other])
        kept = np.arange(len(found)) != other
        count, width, context, cost = count[kept], width[kept], context[kept], cost[kept]
        del found[other]
    return found


def _by_width(
    spans: Sequence[Span], used: list[int], block_size: int, num_blocks: int
) -> Iterator[Rectangle]:
    """A first grouping, by lengths and then by contexts."""

    def saved_in_place(run: Rectangle) -> float:
        if run.spacing is None:
            return 0.0
        blocks = [used[i] for i in run.members]
        in_place = _VIEW_READ * max(blocks) * len(blocks)
        return (_GATHER_READ * sum(blocks) - in_place) * block_size

    for members in _widths(spans):
        rest: list[Rectangle] = []
        for run in _slab_runs(spans, members, used, num_blocks):
            if saved_in_place(run) > _GROUP:
                yield run
            else:
                rest.append(run)
        if len(rest) == 1 and saved_in_place(rest[0]) > 0:
            yield rest[0]
        else:
            scattered = [index for run in rest for index in run.members]
            yield from (Rectangle(group, None) for group in _by_length(scattered, used, block_size))


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
) -> Iterator[Rectangle]:
    """Split into runs of evenly spaced slabs; a span in scattered blocks comes alone, with None.

    All spans of a run are read as long as its longest: that may reach into a neighbour's blocks,
    which the mask hides, but not past the end of the cache.
    """
    run: list[int] = []
    spacing = longest = 0
    for index in sorted(members, key=lambda i: spans[i].blocks[0]):
        first = spans[index].blocks[0]
        if not _consecutive(spans[index].blocks, used[index]):
            yield Rectangle([index], None)
            continue
        gap = first - spans[run[-1]].blocks[0] if run else 0
        fits = gap == spacing if len(run) > 1 else gap > 0
        if run and fits and first + max(longest, used[index]) <= num_blocks:
            run.append(index)
            spacing, longest = gap, max(longest, used[index])
        else:
            if run:
                yield Rectangle(run, spacing)
            run, spacing, longest = [index], used[index], used[index]
    if run:
        yield Rectangle(run, spacing)


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
