"""What the driver reports about its steps, for metrics and benches."""

from dataclasses import dataclass
from typing import Protocol

from dspark.engine.events import StepOutcome


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Where the seconds of one step went; draft, plan, verify, wire and commit add up
    to (nearly) `total`."""

    draft: float  # inside the drafter; of a failed draft, the wait for it
    draft_wait: float  # until the draft was there, the wire included
    plan: float  # engine, before the target step
    verify: float  # inside the verifier
    backbone: float  # of `verify`: the target's layers
    head: float  # of `verify`: the LM head and acceptance
    wire: float  # waiting for the workers less the seconds they worked
    commit: float  # engine and delivery, after the target step
    total: float


class Observer(Protocol):
    def on_step(self, outcome: StepOutcome, timing: StepTiming) -> None: ...

    def on_fallback(self, reason: str) -> None:
        """The driver went on without a worker's answer: `reason` is a short metric label."""
        ...


class NullObserver:
    def on_step(self, outcome: StepOutcome, timing: StepTiming) -> None:
        pass

    def on_fallback(self, reason: str) -> None:
        pass
