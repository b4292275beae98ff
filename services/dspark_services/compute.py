"""The one thread of a process in which its models are loaded and run."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any = None
    error: BaseException | None = None

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class ComputeThread:
    """Runs calls one after another in a thread of their own.

    libgomp keeps a team of threads for every thread that ever ran a parallel operation, and once
    there are more threads than cores it lets none of them spin: each of a step's several hundred
    operations then pays for waking a sleeping one, a third of a step on two cores. So loading,
    profiling and serving share one thread, and so do two workers in one process.

    Two bare queues hand a call over and back in 50 us, where an executor's future takes 120, twice
    a step.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Callable[[_Outcome], None]]]
        self._calls = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` there and wait for it."""
        outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        self._calls.put((partial(function, *args, **kwargs), outcomes.put))
        return outcomes.get().get()  # type: ignore[no-any-return]

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` there without holding up the event loop."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[_Outcome] = loop.create_future()

        def settle(outcome: _Outcome) -> None:
            if not waiter.done():  # else nobody waits any more
                waiter.set_result(outcome)

        def done(outcome: _Outcome) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(settle, outcome)

        def unless_given_up() -> T | None:
            return None if waiter.cancelled() else function(*args, **kwargs)

        self._calls.put((unless_given_up, done))
        return (await waiter).get()  # type: ignore[no-any-return]

    def drain(self) -> None:
        """Wait for the calls in progress."""
        self.call(lambda: None)

    def _work(self) -> None:
        while True:
            function, done = self._calls.get()
            try:
                outcome = _Outcome(function())
            except BaseException as error:  # the caller's, whatever it is
                outcome = _Outcome(error=error)
            done(outcome)
            del function, done, outcome  # a batch is not kept until the next one comes
