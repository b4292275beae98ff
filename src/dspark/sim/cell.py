"""One scheduler with its two workers under a virtual clock: the driver's loop without any I/O."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from dspark.core.cost import StepCost
from dspark.core.planner import Planner
from dspark.core.types import SamplingParams, SequenceKey, TargetInfo
from dspark.engine.admission import Limits
from dspark.engine.engine import Engine
from dspark.engine.events import SequenceEvent, StepOutcome, StepStart, Usage
from dspark.engine.request import Request
from dspark.sim.load import Arrivals
from dspark.sim.script import RIGHT, VOCAB_SIZE, Script, draw_script
from dspark.sim.workers import VirtualDrafter, VirtualVerifier, features
from dspark.sim.workload import Workload

_KV_BLOCK = 16  # tokens


@dataclass(slots=True)
class Journey:
    """One request's times, in virtual seconds, and its totals."""

    domain: str
    asked: int  # output tokens
    arrived: float
    first_token: float = 0.0
    finished: float = 0.0
    usage: Usage | None = None  # None until it is finished


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as the log has it; lengths and counters are sums over its rows."""

    step: int
    time: float  # virtual seconds when it ended
    seconds: float
    running: int
    waiting: int
    batch_tokens: int
    prefill_tokens: int
    proposed: int
    admitted: int
    accepted: int
    committed: int
    gate: str

    @classmethod
    def of(cls, outcome: StepOutcome, now: float, seconds: float) -> Self:
        stats = outcome.stats
        return cls(
            step=outcome.step,
            time=now,
            seconds=seconds,
            running=stats.running,
            waiting=stats.waiting,
            batch_tokens=stats.batch_tokens,
            prefill_tokens=stats.prefill_tokens,
            proposed=stats.proposed,
            admitted=stats.admitted,
            accepted=stats.accepted,
            committed=sum(len(event.tokens) for event in outcome.events),
            gate=stats.gate.state.value,
        )


Observe = Callable[[StepRecord], None]


@dataclass(slots=True)
class CellResult:
    """What one cell did. `seconds`: virtual time at which its last request was answered."""

    journeys: list[Journey] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0  # with rows in them
    drafted_steps: int = 0


class Cell:
    """Runs its requests to the end. `cost` is both what steps take and what the engine believes."""

    def __init__(
        self,
        workload: Workload,
        cost: StepCost,
        planner: Planner,
        limits: Limits,
        seed: int,
        observe: Observe | None = None,
    ) -> None:
        self._workload = workload
        self._seed = seed
        self._observe = observe
        self._overhead = cost.overhead_seconds
        self._sampling = SamplingParams(temperature=workload.temperature)
        self._scripts: dict[SequenceKey, Script] = {}  # of the requests under way
        self._journeys: dict[SequenceKey, Journey] = {}
        self._drafter = VirtualDrafter(self._scripts, cost, workload.block_size)
        self._verifier = VirtualVerifier(cost)
        self._engine = Engine(
            incarnation=1,
            target=_target(workload, limits.max_running),
            planner=planner,
            cost=cost,
            limits=limits,
        )
        self._engine.attach_drafter(self._drafter.info)

    def run(self, arrivals: Arrivals) -> CellResult:
        result = CellResult()
        now = 0.0
        while True:
            for arrived, index in arrivals.take(now):
                self._add(index, arrived)
            start = self._engine.begin()
            if start is not None:
                outcome, seconds = self._step(start)
                now += seconds
                for event in outcome.events:
                    if self._deliver(event, now, result):
                        arrivals.answered(now)
                if seconds:
                    result.steps += 1
                    result.drafted_steps += outcome.stats.proposed > 0
                    if self._observe is not None:
                        self._observe(StepRecord.of(outcome, now, seconds))
            elif (later := arrivals.next_time) is not None:
                now = later
            else:
                return result

    def _step(self, start: StepStart) -> tuple[StepOutcome, float]:
        """What the step did, and the seconds it took; 0 if it only closed sequences."""
        engine = self._engine
        for fetch in start.fetch:
            engine.supply(fetch.key, features(fetch.stop - fetch.start))
        wanted = engine.draft_batch()
        drafts = None if wanted is None else self._drafter.draft(wanted)
        batch = engine.plan(drafts)
        verdicts = self._verifier.verify(batch)
        seconds = verdicts.seconds + (0.0 if drafts is None else drafts.seconds)
        engine.commit(verdicts)
        return engine.account(), seconds + (self._overhead if batch.rows else 0.0)

    def _add(self, index: int, arrived: float) -> None:
        script = draw_script(self._workload, self._seed, index)
        request = Request(
            prompt=(RIGHT,) * script.prompt_len,
            max_tokens=script.output_len,
            detokenizer=_Mute(),
            sampling=self._sampling,
        )
        key = self._engine.add(request)
        self._scripts[key] = script
        self._journeys[key] = Journey(script.domain.name, script.output_len, arrived)

    def _deliver(self, event: SequenceEvent, now: float, result: CellResult) -> bool:
        """Whether this was the request's last event."""
        journey = self._journeys[event.key]
        if not journey.first_token:
            journey.first_token = now
        if event.finish is None:
            return False
        journey.finished, journey.usage = now, event.usage
        result.journeys.append(self._journeys.pop(event.key))
        result.seconds = now
        del self._scripts[event.key]
        return True


class _Mute:
    """Virtual tokens have no text."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _target(workload: Workload, max_running: int) -> TargetInfo:
    """A target with room for every running request: memory is not what is simulated."""
    return TargetInfo(
        incarnation=1,
        model_id="virtual",
        target_digest="",
        head_digest="",
        fusion_digest="",
        vocab_size=VOCAB_SIZE,
        max_context=workload.longest + 1,
        num_blocks=max_running * -(-workload.longest // _KV_BLOCK),
        block_size=_KV_BLOCK,
        precision="virtual",
        device="virtual",
    )
