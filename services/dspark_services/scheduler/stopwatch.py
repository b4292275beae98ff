"""Where the seconds of one step go."""

from time import perf_counter

from dspark.core.types import DraftReply, VerifyReply
from dspark_services.scheduler.observer import StepTiming


class Stopwatch:
    """Wall seconds of a step by part; laps of the same name add up."""

    def __init__(self) -> None:
        self._started = self._last = perf_counter()
        self._parts = dict.fromkeys(("fetch", "plan", "draft", "verify", "commit"), 0.0)

    def lap(self, part: str) -> None:
        now = perf_counter()
        self._parts[part] += now - self._last
        self._last = now

    def timing(self, drafts: DraftReply | None, verdicts: VerifyReply) -> StepTiming:
        parts = self._parts
        draft = parts["draft"] if drafts is None else drafts.seconds
        return StepTiming(
            draft=draft,
            draft_wait=parts["draft"],
            plan=parts["plan"],
            verify=verdicts.seconds,
            backbone=verdicts.backbone_seconds,
            head=verdicts.head_seconds,
            wire=parts["fetch"] + parts["draft"] - draft + parts["verify"] - verdicts.seconds,
            commit=parts["commit"],
            total=self._last - self._started,
        )
