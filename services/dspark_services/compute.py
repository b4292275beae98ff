"""The one thread of a process in which its models are loaded and run."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs calls one after another in a thread of their own.

    libgomp keeps a team of threads for every thread that ever ran a parallel operation, and once
    there are more threads than cores it lets none of them spin: each of a step's several hundred
    operations then pays for waking a sleeping one, a third of a step on two cores. So loading,
    profiling and serving share one thread, and so do two workers in one process.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` there and wait for it."""
        return self._executor.submit(function, *args, **kwargs).result()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` there without holding up the event loop."""
        return await asyncio.wrap_future(self._executor.submit(function, *args, **kwargs))

    def drain(self) -> None:
        """Wait for the calls in progress."""
        self.call(lambda: None)
