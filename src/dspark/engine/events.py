"""What a step tells the outside: who got which tokens and text, and what the step did."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dspark.core.types import DraftSource, SequenceKey
from dspark.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class FeatureFetch:
    """Ask the verifier for the features of positions [start, stop) and hand them to `supply`."""

    key: SequenceKey
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StepStart:
    """Step number, and the features to fetch before `Engine.draft_batch` is called."""

    step: int
    fetch: tuple[FeatureFetch, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of one sequence. Token counts are committed tokens, the ending token included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens that came from the prefix cache
    steps: int  # target steps that committed something, the end of prefill included
    proposed: int
    admitted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """What one step committed for one sequence. The last event carries `finish` and `usage`.

    `text` lags behind `tokens` while a stop string may still complete; the concatenated texts of
    all events are the sequence's output. `admitted` and `accepted` count this step's draft tokens.
    """

    key: SequenceKey
    tokens: tuple[int, ...]
    text: str
    admitted: int
    accepted: int
    finish: FinishReason | None = None
    usage: Usage | None = None


class GateState(StrEnum):
    OFF = "off"  # no drafter attached, or the planner never drafts
    PROFILING = "profiling"  # a drafter was met and is being timed
    NO_DATA = "no-data"  # no cost profile: nothing can be judged, so nothing is drafted
    WARMING_UP = "warming-up"  # drafts, to collect the first observations
    VERIFY_ALL = "verify-all"  # drafts, and the last plan had all of it verified
    TRIMMING = "trimming"  # drafts, and the last plan left some of it out
    PARKED = "parked"  # speculation does not pay: not even drafted
    PROBING = "probing"  # parked, but this step drafts to see whether that still holds

    @property
    def pays(self) -> bool:
        """Whether the gate holds drafting for worth it."""
        return self in (GateState.VERIFY_ALL, GateState.TRIMMING)


@dataclass(frozen=True, slots=True)
class GateStatus:
    """The gate's last decision. `gain` = expected throughput with drafts / without, minus 1."""

    state: GateState
    reason: str
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step in numbers. Entry j of `*_by_position` counts rows with a token at draft position
    j, for as many positions as a block has; empty when nothing was drafted.

    The four draft counters are never merged: proposed = admitted + trimmed; accepted counts draft
    tokens that were committed. `verified_lengths` and `accepted_lengths` have one entry for each
    decoding row that committed: 1 + admitted, and tokens committed. Seconds are the verifier's.
    """

    rows: int  # rows that committed, those that ended their prefill included
    prefill_tokens: int  # as planned; those the prefix cache had were not processed
    batch_tokens: int  # B as the verifier counted it
    head_rows: int  # H as planned: rows that needed logits
    context_tokens: int  # C as planned, over all rows
    proposed_by_position: tuple[int, ...]
    admitted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    verified_lengths: tuple[int, ...]
    accepted_lengths: tuple[int, ...]
    proposed_by_source: Mapping[DraftSource, int]  # of the sources that drafted
    accepted_by_source: Mapping[DraftSource, int]
    destroyed: int  # tokens committed on cap-accept rows that the planner would have trimmed
    spared: int  # tokens of those rows that it would have trimmed and that came to nothing
    resynced: int  # drafts that were unusable: the drafter's length disagreed, or it erred
    reopened: int  # rows the verifier did not know
    waiting: int
    running: int
    gate: GateStatus
    verify_seconds: float
    predicted_seconds: float | None  # None without a cost profile
    q_gap: float  # largest |q sent - q rebuilt| of the step

    @property
    def proposed(self) -> int:
        return sum(self.proposed_by_position)

    @property
    def admitted(self) -> int:
        return sum(self.admitted_by_position)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def trimmed(self) -> int:
        return self.proposed - self.admitted

    @property
    def trimmed_by_position(self) -> tuple[int, ...]:
        return tuple(
            proposed - admitted
            for proposed, admitted in zip(
                self.proposed_by_position, self.admitted_by_position, strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class StepOutcome:
    step: int
    events: tuple[SequenceEvent, ...]
    stats: StepStats
