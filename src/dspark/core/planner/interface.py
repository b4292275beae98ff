"""What a planner is asked, and what it is told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dspark.core.cost import StepCost
from dspark.core.survival import CurrentScores, HistoricalScores

Lengths: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepLoad:
    """What a step carries besides its drafts; all of it fixed before the drafts are known.

    R, the number of requests, counts the rows that commit in this step.
    """

    base_tokens: int  # rows of the target step without any draft: anchors and prefill chunks
    context_tokens: int  # C: context tokens all rows attend to
    caps: Lengths  # [R] most draft tokens a row may verify, from committed state only; 0: no draft
    weights: NDArray[np.float64]  # [R] what a token of the row counts, 1 as a rule
    capacity: int  # K: most draft tokens the step may verify
    drafter_rows: int | None = None  # requests that a drafter is asked for; None: all with a cap
    decodes: bool = True  # every row of the step goes on from its anchor: no prefill beside
    determined: bool = False  # no row that may draft is in `rejection` mode: the output is a given

    def __post_init__(self) -> None:
        if self.caps.shape != (self.requests,) or self.weights.shape != (self.requests,):
            raise ValueError(
                f"a step needs one cap and one weight for each request, "
                f"not {self.caps.shape} and {self.weights.shape}"
            )

    @property
    def requests(self) -> int:
        return len(self.caps)

    @property
    def drafting(self) -> int:
        """Requests that may draft."""
        return int(np.count_nonzero(self.caps))

    @property
    def paid(self) -> int:
        """Requests whose drafts take a drafter's time."""
        return self.drafting if self.drafter_rows is None else self.drafter_rows


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a planner makes of a step before it drafts."""

    capacity: int  # K: most draft tokens the step is to verify, at most `load.capacity`
    expect: Callable[[], float] | None = None
    """Works out `throughput`, which a step that was measured can do without."""

    @property
    def throughput(self) -> float | None:
        """Expected tokens per second of the step if it pays for a draft, whatever is then verified;
        may be below `plain_throughput`. None: no judgement, draft in any case."""
        return None if self.expect is None else self.expect()


class Planner(Protocol):
    """A policy. Stateless: everything it may look at is passed in."""

    @property
    def name(self) -> str:
        """The setting that selects it."""
        ...

    def draft_length(self, block_size: int) -> int:
        """Tokens worth drafting for a request, 0..block_size."""
        ...

    def outlook(self, scores: HistoricalScores, load: StepLoad, cost: StepCost) -> Outlook:
        """Called before the step drafts. `scores` is a sample of N earlier blocks; N = 0: nothing
        is known about the drafter yet."""
        ...

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        """Draft tokens to verify, [R], at most `load.caps` and `load.capacity` in all."""
        ...
