"""What steps are expected to bring and to cost, for every number of admitted tokens at once."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dspark.core.cost import StepCost
from dspark.core.planner.interface import Lengths, StepLoad
from dspark.core.survival import HistoricalScores

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Prospects:
    """S steps of one kind, each with N ranked tokens of which the first 0..N are admitted."""

    tokens: Values  # [S, N + 1] expected tokens
    seconds: Values  # [N + 1] of the whole step

    @classmethod
    def of(cls, ranked: Values, load: StepLoad, cost: StepCost) -> Self:
        """From the values of the ranked tokens, falling, [S, N]."""
        tokens = np.zeros((ranked.shape[0], ranked.shape[1] + 1))
        np.cumsum(ranked, axis=1, out=tokens[:, 1:])
        tokens += load.weights.sum()
        fixed = cost.overhead_seconds + cost.draft_seconds(load.paid)
        verify = cost.verify_seconds_of_more(
            load.base_tokens, load.requests, load.context_tokens, ranked.shape[1]
        )
        return cls(tokens, fixed + verify)

    def mean(self) -> Self:
        """The mean step, as the only one."""
        return type(self)(self.tokens.mean(axis=0, keepdims=True), self.seconds)

    def best(self) -> Lengths:
        """How many tokens to admit for the highest throughput, [S]; of several the fewest."""
        return np.asarray((self.tokens / self.seconds).argmax(axis=1), np.int64)

    def first_decline(self) -> Lengths:
        """How many tokens to admit if only as long as each of them raises throughput, [S]."""
        throughput = self.tokens / self.seconds
        stops = np.ones(throughput.shape, bool)  # the last one: there is nothing left to admit
        np.less_equal(throughput[:, 1:], throughput[:, :-1], out=stops[:, :-1])
        return np.asarray(stops.argmax(axis=1), np.int64)

    def throughput(self, counts: Lengths) -> float:
        """Tokens per second over all steps, admitting `counts` [S] tokens in each."""
        tokens = self.tokens[np.arange(len(counts)), counts]
        return float(tokens.sum() / self.seconds[counts].sum())


def plain_throughput(load: StepLoad, cost: StepCost) -> float:
    """Expected tokens per second of a step that neither drafts nor verifies a draft."""
    step = Prospects.of(np.empty((1, 0)), replace(load, drafter_rows=0), cost)
    return step.throughput(np.zeros(1, np.int64))


def rehearsal(scores: HistoricalScores, load: StepLoad, cost: StepCost) -> Prospects:
    """Steps like this one, with drafts dealt from a sample of N > 0 blocks.

    The sample goes out in the order given and starts again where it ends, as many blocks a step as
    requests may draft, each block cut and weighted like the request it stands for.
    """
    sample, rows = scores.survival, np.flatnonzero(load.caps)
    steps = max(len(sample) // max(len(rows), 1), 1)
    dealt = sample[np.arange(steps * len(rows)) % len(sample)]
    blocks = dealt.reshape(steps, len(rows), sample.shape[1]) * load.weights[rows, None]
    blocks[:, np.arange(sample.shape[1]) >= load.caps[rows, None]] = 0.0
    ranked = np.sort(blocks.reshape(steps, -1), axis=1)[:, ::-1]
    return Prospects.of(ranked[:, : load.capacity], load, cost)
