"""Processes of a tiny system stop answering, die and return; others never get to start.

What `dspark up` does about a service that died is tested with the supervisor.
"""

# ruff: noqa: ASYNC110 - other processes set no event

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from dspark_services.scheduler.api.text import TargetText

from dspark.bench.load import closed_loop
from dspark.bench.scrape import scrape
from dspark.data import Prompt
from dspark.ops.ports import free_ports
from tests.support.processes import Running, exit_status, running
from tests.support.system import Reference
from tests.support.tiny import tiny_drafter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Their answers go on to LENGTH, with no two likeliest tokens nearly alike.
PROMPTS = [Prompt(f"{n}", "tiny", f"Question {n}?") for n in (0, 1, 3, 5, 8, 10, 12, 13)]
LENGTH = 400


@pytest.fixture(scope="module")
def plain(tiny_target_folder: Path) -> list[tuple[int, ...]]:
    """What transformers makes of PROMPTS, token by token and without any draft."""
    text, reference = TargetText.from_folder(tiny_target_folder), Reference(tiny_target_folder)
    answers = []
    for prompt in PROMPTS:
        ids = text.encode_chat([{"role": "user", "content": prompt.prompt}])
        tokens = reference.tokens(ids, LENGTH)
        end = next((i for i, token in enumerate(tokens) if token in text.eos_ids), LENGTH)
        answers.append(tuple(tokens[: end + 1]))
    assert min(map(len, answers)) > LENGTH / 2  # long enough for what happens meanwhile
    return answers


@dataclass
class System:
    """Three processes, of which the workers can be started again where they were."""

    flags: list[str]
    stack: AsyncExitStack
    url: str = ""

    async def start(self, service: str) -> Running:
        process = await self.stack.enter_async_context(running(service, *self.flags))
        await process.line("serving port=" if service != "scheduler" else " ready$")
        return process

    async def answers(self, prompts: Sequence[Prompt] = PROMPTS) -> list[tuple[int, ...]]:
        """Streamed greedily, all at once."""
        answers = await closed_loop(self.url, prompts, concurrency=len(prompts), max_tokens=LENGTH)
        return [answer.token_ids for answer in answers]

    async def total(self, metric: str, label: str | None = None) -> float:
        """A metric of the scheduler, over all labels or of one."""
        samples = await asyncio.to_thread(scrape, self.url)
        wanted = (f"dspark_{metric}_total",) if label is None else (f"dspark_{metric}_total", label)
        return sum(v for key, v in samples.items() if key[: len(wanted)] == wanted)

    async def rises(self, metric: str, above: float, label: str | None = None) -> None:
        """Wait until a metric does."""
        while await self.total(metric, label) <= above:
            await asyncio.sleep(0.01)

    async def until_complete(self) -> None:
        """Wait until the scheduler says that no worker is missing."""
        async with httpx.AsyncClient(trust_env=False) as client:
            while (await client.get(f"{self.url}/ready")).json()["missing"]:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def system(flags: list[str], *more: str) -> AsyncIterator[System]:
    """Ports are given, so that a worker comes back where its peers look for it."""
    api, drafter, verifier = free_ports("127.0.0.1", 3)
    ports = [
        f"--port={api}",
        f"--drafter-port={drafter}",
        f"--drafter-endpoint=127.0.0.1:{drafter}",
        f"--verifier-port={verifier}",
        f"--verifier-endpoint=127.0.0.1:{verifier}",
    ]
    async with AsyncExitStack() as stack:
        yield System([*flags, *ports, *more], stack, f"http://127.0.0.1:{api}")


async def test_a_drafter_that_hangs_dies_and_returns_changes_no_answer(
    tiny_settings_argv: list[str], plain: list[tuple[int, ...]]
) -> None:
    async with system(tiny_settings_argv, "--planner=fixed:3", "--draft-timeout=0.3") as tiny:
        _, drafter, _ = [await tiny.start(s) for s in ("verifier", "drafter", "scheduler")]
        answers = asyncio.create_task(tiny.answers())
        await tiny.rises("proposed_tokens", 50)

        drafter.process.send_signal(signal.SIGSTOP)
        await tiny.rises("fallbacks", 0, "drafter")
        undrafted = await tiny.total("proposed_tokens")
        drafter.process.send_signal(signal.SIGCONT)
        await tiny.rises("proposed_tokens", undrafted)

        drafter.process.kill()
        await tiny.rises("fallbacks", 1, "drafter")
        assert not answers.done()
        assert await answers == plain

        undrafted = await tiny.total("proposed_tokens")
        await tiny.start("drafter")
        await tiny.until_complete()
        assert await tiny.answers(PROMPTS[:1]) == plain[:1]
        assert await tiny.total("proposed_tokens") > undrafted


async def test_a_verifier_that_dies_and_returns_loses_and_repeats_no_token(
    tiny_settings_argv: list[str], plain: list[tuple[int, ...]]
) -> None:
    async with system(tiny_settings_argv, "--planner=fixed:3") as tiny:
        verifier, _, _ = [await tiny.start(s) for s in ("verifier", "drafter", "scheduler")]
        answers = asyncio.create_task(tiny.answers())
        await tiny.rises("proposed_tokens", 50)
        verifier.process.kill()
        await tiny.rises("fallbacks", 0, "verifier")
        assert not answers.done()
        await tiny.start("verifier")
        assert await answers == plain


@pytest.mark.parametrize("service", ["drafter", "verifier", "supervisor"])
async def test_an_unreadable_drafter_stops_the_start_with_one_line(
    service: str, tiny_settings_argv: list[str], tiny_drafter_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_drafter_folder, tmp_path, dirs_exist_ok=True)
    os.truncate(tmp_path / "model.safetensors", 1000)
    async with running(service, *tiny_settings_argv, f"--drafter={tmp_path}") as command:
        assert await exit_status(command) == 2
    reason = "model.safetensors cannot be read"
    told = [line for line in command.complaints if "ended for good" not in line]
    assert 1 <= len(told) <= (2 if service == "supervisor" else 1)  # by each worker that reads it
    assert all(reason in line for line in told)


async def test_workers_with_two_different_drafters_stop_the_scheduler_with_one_line(
    tiny_settings_argv: list[str], tiny_target_folder: Path, tmp_path: Path
) -> None:
    other = tiny_drafter(tmp_path, tiny_target_folder, seed=5)
    async with system(tiny_settings_argv) as tiny:
        await tiny.start("verifier")
        tiny.flags.append(f"--drafter={other}")
        await tiny.start("drafter")
        scheduler = await tiny.stack.enter_async_context(running("scheduler", *tiny.flags))
        assert await exit_status(scheduler) == 2
    (complaint,) = scheduler.complaints
    assert "fusion_digest differs" in complaint
