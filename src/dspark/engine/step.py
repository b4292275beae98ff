"""A step: its rows, filled in from `begin` to `commit` and read once more by `account`."""

from dataclasses import dataclass, field

import numpy as np

from dspark.core.cost import StepCost
from dspark.core.planner import Lengths, StepLoad
from dspark.core.survival import CurrentScores
from dspark.core.types import Draft, DrafterInfo, SequenceKey, VerificationMode
from dspark.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Row:
    """One sequence in one step: a prefill chunk, or an anchor with its draft."""

    sequence: Sequence
    num_pending: int
    max_draft: int = 0  # draft tokens it may get; follows from committed state
    found: Draft | None = None  # what prompt lookup drafts for it, so no drafter is asked
    asked: bool = False  # part of the draft batch that went out
    draft: Draft | None = None  # what came back, if it is usable
    shadowed: bool = False  # verified whole, to learn what its plan would have destroyed
    planned: int = 0  # draft tokens that the planner admits
    accepted: int | None = None  # as the verdict says; None: not judged
    committed: int = 0  # tokens kept, fewer than accepted + 1 where the output ended
    decoding: bool = field(init=False)
    commits: bool = field(init=False)  # reaches the anchor, so the target's token gets committed

    def __post_init__(self) -> None:
        self.decoding = self.sequence.decoding
        self.commits = self.num_pending == self.sequence.pending

    @property
    def proposed(self) -> int:
        return 0 if self.draft is None else len(self.draft.tokens)

    @property
    def admitted(self) -> int:
        """Draft tokens that are verified."""
        return self.proposed if self.shadowed else self.planned

    @property
    def kept(self) -> int:
        """Draft tokens that were committed: what lies past the end of the output is not."""
        return min(self.accepted or 0, self.committed)

    @property
    def destroyed(self) -> int:
        """Draft tokens that were committed although the planner would have trimmed them."""
        return max(self.kept - self.planned, 0)


@dataclass(slots=True, eq=False)
class Step:
    """`drafter` and `drafter_closes` are set once a draft batch went out, the rest by `plan`."""

    number: int
    rows: list[Row]
    cost: StepCost | None = None  # fixed with the rows: another one is for the steps that follow
    capacity: int = 0  # draft tokens that may be planned; fixed before anything is drafted
    drafter: DrafterInfo | None = None
    drafter_closes: tuple[SequenceKey, ...] = ()
    resynced: int = 0
    planned: bool = False
    verifier_closes: tuple[SequenceKey, ...] = ()
    scores: CurrentScores | None = None  # of `committing`, in order; None without any draft
    head_rows: int = 0  # rows of the target step that need logits
    context_tokens: int = 0  # that all rows attend to, drafts not counted
    planned_tokens: int = 0  # rows of the target step, admitted drafts included
    reopened: int = 0

    @property
    def committing(self) -> list[Row]:
        return [row for row in self.rows if row.commits]

    @property
    def base_tokens(self) -> int:
        """Rows of the target step without any draft."""
        return sum(row.num_pending for row in self.rows)

    @property
    def predicted_seconds(self) -> float | None:
        """Of the target step as planned; None without a cost profile."""
        if self.cost is None:
            return None
        seconds = self.cost.verify_seconds(self.planned_tokens, self.head_rows, self.context_tokens)
        return float(seconds)

    @property
    def decodes(self) -> bool:
        """Whether no row is a prefill. Only such steps are timed."""
        return all(row.decoding for row in self.rows)

    @property
    def drafts(self) -> bool:
        """Whether a draft of some row was on its way, or there at once."""
        return any(row.asked or row.draft is not None for row in self.rows)

    @property
    def modes(self) -> set[VerificationMode]:
        """Of the rows that may draft; committed state only."""
        return {row.sequence.request.sampling.mode for row in self.rows if row.max_draft}

    @property
    def determined(self) -> bool:
        """Whether the output is the same whatever is verified."""
        return VerificationMode.REJECTION not in self.modes

    def load(self, caps: Lengths, capacity: int, *, drafter_rows: int) -> StepLoad:
        """The step as planners see it, with `caps` for the rows of `committing`, of which so many
        take a drafter's time."""
        return StepLoad(
            base_tokens=self.base_tokens,
            context_tokens=sum(row.sequence.computed_len + row.num_pending for row in self.rows),
            caps=caps,
            weights=np.array([row.sequence.request.weight for row in self.committing], np.float64),
            capacity=capacity,
            drafter_rows=drafter_rows,
            decodes=self.decodes,
            determined=self.determined,
        )

    def caps(self) -> Lengths:
        """Most draft tokens each committing row may get, before anything is drafted, [R]."""
        return np.array([row.max_draft for row in self.committing], np.int64)
