"""The engine, its driver and real tiny workers in one event loop, with workers that can be lost."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from dspark_services.process import new_incarnation
from dspark_services.scheduler.drafter_link import DrafterTiming
from dspark_services.scheduler.driver import Driver
from dspark_services.scheduler.observer import StepTiming
from dspark_services.scheduler.streams import EventStream
from transformers import AutoModelForCausalLM

from dspark.core.cost import Curve, StepCost
from dspark.core.errors import WorkerUnavailableError
from dspark.core.planner import FixedPlanner, Planner
from dspark.core.types import SamplingParams
from dspark.engine.admission import Limits
from dspark.engine.engine import Engine
from dspark.engine.events import StepOutcome
from dspark.engine.request import Request

GREEDY = SamplingParams(temperature=0.0)
COST = StepCost(tokens=Curve((1, 100), (0.01, 0.02)), draft=Curve((1, 100), (1e-4, 2e-4)))
LIMITS = Limits(max_running=8, max_prefill_tokens=16)


class Numbers:
    """A detokenizer whose text shows every token."""

    def push(self, token: int) -> str:
        return f"{token} "

    def flush(self) -> str:
        return ""


def request(prompt: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> Request:
    return Request(tuple(prompt), max_tokens, Numbers(), sampling)


async def collect(stream: EventStream) -> list[int]:
    """All tokens of a stream, checked against its text and usage."""
    tokens: list[int] = []
    text = ""
    async for event in stream:
        tokens += event.tokens
        text += event.text
        usage = event.usage
    assert text == "".join(f"{token} " for token in tokens)
    assert usage is not None
    assert usage.completion_tokens == len(tokens)
    return tokens


class Reference:
    """What transformers generates greedily with the same target."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder)

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        return output[0, len(prompt) :].tolist()


class Losable:
    """A worker that the test can take away, and bring back as a new process would come back."""

    def __init__(self, port: Any) -> None:
        self.port = port
        self.gone = False
        self.calls = 0
        self._incarnation: int | None = None

    def restart(self, port: Any = None) -> None:
        """Come back with empty memory: another worker, or this one under another incarnation."""
        self.port = port or self.port
        self._incarnation = new_incarnation()
        self.gone = False

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.gone:
                raise WorkerUnavailableError("taken away by the test")
            reply = await getattr(self.port, name)(*arguments)
            if self.gone:
                raise WorkerUnavailableError("taken away by the test")
            if name == "handshake" and self._incarnation is not None:
                return replace(reply, incarnation=self._incarnation)
            return reply

        return call


@dataclass
class Recorder:
    """An observer that keeps everything, beside the task it observes."""

    loop: asyncio.Task[None] = field(init=False)
    steps: list[tuple[StepOutcome, StepTiming]] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)

    def on_step(self, outcome: StepOutcome, timing: StepTiming) -> None:
        self.steps.append((outcome, timing))

    def on_fallback(self, reason: str) -> None:
        self.fallbacks.append(reason)

    @property
    def proposed(self) -> int:
        return sum(outcome.stats.proposed for outcome, _ in self.steps)

    @property
    def accepted(self) -> int:
        return sum(outcome.stats.accepted for outcome, _ in self.steps)


@asynccontextmanager
async def running_driver(
    verifier: Any,
    drafter: Any,
    *,
    planner: Planner | None = None,
    cost: StepCost = COST,
    limits: Limits = LIMITS,
    verifier_deadline: float = 30.0,
    max_waiting: int = 100,
    time_drafter: DrafterTiming | None = None,
    refresh_cost: bool = False,
    lookup: bool = False,
) -> AsyncIterator[tuple[Driver, Recorder]]:
    """A driver in its loop, ``Recorder.loop``."""
    target = await verifier.handshake()
    engine = Engine(
        incarnation=new_incarnation(),
        target=target,
        planner=planner or FixedPlanner(3),
        cost=cost,
        limits=limits,
        lookup=lookup,
    )
    recorder = Recorder()
    driver = Driver(
        engine,
        target,
        verifier,
        drafter,
        verifier_deadline=verifier_deadline,
        max_waiting=max_waiting,
        time_drafter=time_drafter,
        refresh_cost=refresh_cost,
        observer=recorder,
    )
    recorder.loop = asyncio.create_task(driver.run())
    try:
        yield driver, recorder
    finally:
        recorder.loop.cancel()


async def until(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is watched sets no event
            await asyncio.sleep(0.005)
