"""Commands of this project as processes, and what they have printed so far."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Running:
    """A running command; stdout and stderr are read as one."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())

    async def line(self, pattern: str, seconds: float = 120.0) -> re.Match[str]:
        """The last line so far that matches, waiting for one if there is none."""
        async with asyncio.timeout(seconds):
            while True:
                for line in reversed(self.lines):
                    if match := re.search(pattern, line):
                        return match
                assert self.process.returncode is None, "\n".join(self.lines)
                await asyncio.sleep(0.05)

    @property
    def complaints(self) -> list[str]:
        """What it logged as an error, in full."""
        return [line for line in self.lines if " error " in line or "Traceback" in line]


@asynccontextmanager
async def running(module: str, *flags: str) -> AsyncIterator[Running]:
    """Start ``dspark_services.<module>``; it is told to stop when the context is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"dspark_services.{module}",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    command = Running(process)
    reader = asyncio.create_task(command.read())
    try:
        yield command
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        await reader


async def exit_status(command: Running, seconds: float = 120.0) -> int:
    """Wait for the command to end by itself."""
    return await asyncio.wait_for(command.process.wait(), seconds)
