"""Throughput against what each user gets: planners at equal throughput, at a promised speed, and
against the best that could have been configured by hand."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dspark.bench.contenders import Contender
from dspark.bench.rounds import neighbours, paired_ratio
from dspark.bench.serving import Summary


@dataclass(frozen=True, slots=True)
class Match:
    """A planner at the throughput that a reference had at some concurrency."""

    transport: str
    reference: str
    concurrency: int  # of the reference
    throughput: float  # tokens a second
    reference_rate: float  # tokens a second of the median user
    planner: str
    user_rate: float


@dataclass(frozen=True, slots=True)
class Interactive:
    """The most users of a planner that were measured and got at least `target` tokens a second;
    0 if not even the fewest did."""

    transport: str
    planner: str
    target: float
    users: int
    throughput: float


@dataclass(frozen=True, slots=True)
class Rivalry:
    """A planner against the best static setting of the same load and drafter.

    The rival in a group of neighbouring rounds is the setting that was fastest in all the *others*:
    the fastest over all of them, picked afterwards, owes a part of its lead to luck. A setting that
    was dropped on the way is nobody's rival.
    """

    transport: str
    concurrency: int
    planner: str
    rival: str  # of most groups
    ratio: float  # of throughput to the rival's in the same rounds
    low: float | None  # lower end of its 95 % interval; None: too few rounds for one


def matched(rows: Sequence[Summary]) -> list[Match]:
    """Every other planner at each throughput of a reference that lies on its curve.

    A planner's curve runs through its measured points over rising concurrency, straight in between,
    as in the throughput-interactivity plots of the DSpark paper. Nothing is extrapolated.
    """
    matches = []
    for reference in (row for row in rows if Contender.parse(row.planner).is_reference):
        for planner, curve in _curves(rows, reference.transport).items():
            throughput = [row.throughput for row in curve]
            on_curve = throughput[0] <= reference.throughput <= throughput[-1]
            if planner != reference.planner and on_curve:
                rate = np.interp(reference.throughput, throughput, [row.user_rate for row in curve])
                matches.append(
                    Match(
                        reference.transport,
                        reference.planner,
                        reference.concurrency,
                        reference.throughput,
                        reference.user_rate,
                        planner,
                        float(rate),
                    )
                )
    return matches


def interactive(rows: Sequence[Summary], targets: Iterable[float]) -> list[Interactive]:
    """For every speed and planner, how many users can be promised it."""
    found = []
    for target in targets:
        for transport, planner in dict.fromkeys((row.transport, row.planner) for row in rows):
            fast = [
                row
                for row in rows
                if (row.transport, row.planner) == (transport, planner)
                and row.slow_user_rate >= target
            ]
            best = max(fast, key=lambda row: row.concurrency, default=None)
            found.append(
                Interactive(
                    transport,
                    planner,
                    target,
                    users=0 if best is None else best.concurrency,
                    throughput=0.0 if best is None else best.throughput,
                )
            )
    return found


def rivalries(rows: Sequence[Summary]) -> list[Rivalry]:
    """Every planner that adapts, against the best of the others at each load. Of one run: rounds
    of several runs have nothing in common."""
    found = []
    for row in rows:
        peers = [
            r for r in rows if (r.transport, r.concurrency) == (row.transport, row.concurrency)
        ]
        own = Contender.parse(row.planner)
        static = [
            r
            for r in peers
            if Contender.parse(r.planner).is_static_beside(own) and len(r.rounds) == len(row.rounds)
        ]
        if own.is_static or not static:
            continue
        groups = neighbours(len(row.rounds))
        rivals = [_fastest_but_in(group, static) for group in groups]
        rates = [
            rival.rounds[number]
            for group, rival in zip(groups, rivals, strict=True)
            for number in group
        ]
        ratio, low = paired_ratio(row.rounds, rates)
        usual, _ = Counter(rival.planner for rival in rivals).most_common(1)[0]
        found.append(Rivalry(row.transport, row.concurrency, row.planner, usual, ratio, low))
    return found


def _fastest_but_in(group: Sequence[int], rows: Sequence[Summary]) -> Summary:
    """The row that was fastest in all rounds but these; in these, if there are no others."""

    def others(row: Summary) -> float:
        rest = [rate for number, rate in enumerate(row.rounds) if number not in group]
        return sum(rest or row.rounds)

    return max(rows, key=others)


def _curves(rows: Iterable[Summary], transport: str) -> dict[str, list[Summary]]:
    """The points of each planner that no other of its own points beats in both, by rising
    throughput."""
    curves: dict[str, list[Summary]] = {}
    for row in rows:
        if row.transport == transport:
            curves.setdefault(row.planner, []).append(row)
    for planner, points in curves.items():
        best: list[Summary] = []
        for point in sorted(points, key=lambda row: -row.throughput):
            if not best or point.user_rate > best[-1].user_rate:
                best.append(point)
        curves[planner] = best[::-1]
    return curves
