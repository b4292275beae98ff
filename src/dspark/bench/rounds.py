"""Throughputs that were measured in turns, round by round."""

from collections.abc import Sequence

import numpy as np

from dspark.core.statistics import ratio_interval

_GROUPS = 10
_FEWEST_GROUPS = 3  # that an interval is given for


def neighbours(rounds: int) -> list[list[int]]:
    """The numbers of so many rounds in up to ten groups. Neighbouring rounds saw the same prompts
    and the same state of the machine, so whoever draws rounds draws such a group whole."""
    return [list(group) for group in np.array_split(np.arange(rounds), min(rounds, _GROUPS))]


def paired_ratio(own: Sequence[float], other: Sequence[float]) -> tuple[float, float | None]:
    """Throughput over another's in the same rounds, of which `own` may have had fewer, and the
    lower end of its 95 % interval; None: too few rounds for one."""
    groups = neighbours(len(own))
    above = [sum(own[number] for number in group) for group in groups]
    below = [sum(other[number] for number in group) for group in groups]
    low = None
    if len(groups) >= _FEWEST_GROUPS:
        low, _ = ratio_interval(above, below, np.random.default_rng(0))
    return sum(above) / sum(below), low
