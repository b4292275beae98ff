"""A system under a steady load that takes turns with others: it stops between two steps, with all
its requests, and later goes on as if nothing had been.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter

import httpx

from dspark.bench.load import Answer, keep_asking
from dspark.bench.scrape import PATIENCE, StepTotals, answering, scrape, step_totals
from dspark.data import Prompt

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Turn:
    """What a system did in one turn."""

    seconds: float
    totals: StepTotals

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return self.totals.tokens / self.seconds


class TurnClock:
    """Seconds of the turns that its owner has had."""

    def __init__(self) -> None:
        self._over = 0.0  # seconds of the turns that are over
        self._started: float | None = None

    def __call__(self) -> float:
        return self._over + (0.0 if self._started is None else perf_counter() - self._started)

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self) -> None:
        self._over, self._started = self(), None


class Racer:
    """A system that stands still but in its turns."""

    def __init__(
        self,
        url: str,
        control: httpx.AsyncClient,
        asking: "asyncio.Task[None]",
        clock: TurnClock,
    ) -> None:
        self._url = url
        self._control = control
        self._asking = asking  # the clients, who end by an error alone
        self._clock = clock

    async def turn(self, seconds: float) -> Turn:
        """Go on for so long, and to the end of the step then in flight.

        Raises:
            DSparkError: the server refused or broke off a request, or is gone.
        """
        before, began = scrape(self._url), self._clock()
        self._clock.start()
        await _post(self._control, "resume")
        await asyncio.wait({self._asking}, timeout=seconds)
        if self._asking.done():
            self._asking.result()
        await _post(self._control, "pause")
        self._clock.stop()
        return Turn(self._clock() - began, step_totals(before, scrape(self._url)))


@asynccontextmanager
async def racer(
    url: str,
    prompts: Sequence[Prompt],
    answers: list[Answer],
    *,
    concurrency: int,
    max_tokens: int,
    temperature: float,
) -> AsyncIterator[Racer]:
    """`concurrency` clients of a `pausable` system, who ask the prompts in order, over and over.
    Whole answers go to `answers`, with seconds of the system's turns. Before the first turn all
    clients have got tokens, each with another share of its first answer, which is not kept, still
    to come: so they do not march in step.

    Raises:
        DSparkError: the server refused or broke off a request.
    """
    clock, others = TurnClock(), asyncio.Event()

    def questions() -> Iterator[tuple[Prompt, int]]:
        for index, prompt in enumerate(cycle(prompts)):
            share = 1.0 if index >= concurrency else 1 - index / concurrency
            yield prompt, max(int(share * max_tokens), 1)

    def keep(index: int, answer: Answer) -> None:
        if index >= concurrency:
            answers.append(answer)
        elif index == concurrency - 1:  # the last to begin, and the shortest
            others.set()

    # Made once, since that takes a while of the turn; systems close connections that wait for one.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=url, timeout=PATIENCE, trust_env=False, limits=limits
    ) as control:
        await _post(control, "pause")
        asking = asyncio.create_task(
            keep_asking(
                url,
                questions(),
                keep,
                concurrency=concurrency,
                temperature=temperature,
                clock=clock,
            )
        )
        racing = Racer(url, control, asking, clock)
        try:
            while not others.is_set():
                await racing.turn(_POLL_SECONDS)
            yield racing
        finally:
            asking.cancel()
            await asyncio.wait({asking})
            await _post(control, "resume")
            await _idle(control)


async def _post(control: httpx.AsyncClient, action: str) -> None:
    with answering(str(control.base_url)):
        (await control.post(f"/{action}", json={})).raise_for_status()


async def _idle(control: httpx.AsyncClient) -> None:
    """Wait until the requests whose clients have left are gone."""
    while True:
        with answering(str(control.base_url)):
            status = (await control.get("/status")).json()["driver"]
        if not status["running"] and not status["waiting"]:
            return
        await asyncio.sleep(_POLL_SECONDS)
