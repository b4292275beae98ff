"""`dspark up` as a user runs it: three processes, one of them killed, all of them stopped."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import pytest

from dspark.core.errors import ConfigError
from dspark.ops.ports import listening_socket
from tests.support.processes import exit_status, running
from tests.support.tiny import tiny_drafter, tiny_target

pytestmark = pytest.mark.slow

WORKERS = ("verifier", "drafter")
PROMPTS = [f"Prompt number {index}, " * (1 + index % 3) for index in range(8)]


async def complete(client: httpx.AsyncClient, prompt: str) -> str:
    """The text of a streamed greedy completion."""
    body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "stream": True}
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            assert '"error"' not in line, line
            for part in re.findall(r'"text":("(?:[^"\\]|\\.)*")', line):
                text += part[1:-1]
    assert text
    return text


async def proposed(client: httpx.AsyncClient) -> float:
    metrics = (await client.get("/metrics")).text
    return sum(map(float, re.findall(r"^dspark_proposed_tokens_total\S* (\S+)$", metrics, re.M)))


async def more_proposed(client: httpx.AsyncClient, count: float) -> bool:
    return await proposed(client) >= count


async def complete_system(client: httpx.AsyncClient) -> bool:
    return not (await client.get("/ready")).json()["missing"]


async def all_free(ports: Sequence[int]) -> bool:
    with contextlib.suppress(ConfigError):
        for port in ports:
            listening_socket("127.0.0.1", port).close()
        return True
    return False


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - other processes set no event
            await asyncio.sleep(0.01)


async def test_a_killed_drafter_fails_no_request_and_comes_back(
    tiny_settings_argv: list[str],
) -> None:
    async with running("supervisor", *tiny_settings_argv, "--planner=fixed:3") as up:
        url = (await up.line(r"^Ready: (\S+)$"))[1]
        assert (await up.line(r"^curl .*/v1/chat/completions"))[0]
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
            undisturbed = await asyncio.gather(*(complete(client, p) for p in PROMPTS))
            before = await proposed(client)
            assert before > 0

            requests = asyncio.gather(*(complete(client, p) for p in PROMPTS))
            await eventually(lambda: more_proposed(client, before + 40))
            first = int((await up.line(r"started the drafter pid=(\d+)"))[1])
            os.kill(first, signal.SIGKILL)
            assert await requests == undisturbed

            await eventually(lambda: complete_system(client))
            assert int((await up.line(r"started the drafter pid=(\d+)"))[1]) != first
            before = await proposed(client)
            assert await complete(client, PROMPTS[0]) == undisturbed[0]
            assert await proposed(client) > before
            fallbacks = (await client.get("/metrics")).text
            assert re.search(r'dspark_fallbacks_total\{reason="drafter"\} [1-9]', fallbacks)

        pids = [
            int(match[1])
            for line in up.lines
            if (match := re.search(r"started the \w+ pid=(\d+)", line))
        ]
        up.process.send_signal(signal.SIGTERM)
        assert await exit_status(up) == 0
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 0)
                pytest.fail(f"process {pid} was left behind: {up.lines[-10:]}")


async def test_nothing_outlives_a_supervisor_that_is_killed(tiny_settings_argv: list[str]) -> None:
    async with running("supervisor", *tiny_settings_argv) as up:
        url = (await up.line(r"^Ready: (\S+)$"))[1]
        workers = [await up.line(rf"^{name} +\|.* serving port=(\d+)") for name in WORKERS]
        ports = [int(url.rsplit(":", 1)[1]), *(int(match[1]) for match in workers)]
        for port in ports:
            with pytest.raises(ConfigError, match=str(port)):
                listening_socket("127.0.0.1", port)
        up.process.kill()
        await eventually(lambda: all_free(ports), 60)


async def test_a_drafter_that_does_not_fit_stops_the_start_with_one_line(
    tiny_settings_argv: list[str], tmp_path: Path
) -> None:
    other = tiny_target(tmp_path / "target", vocab_size=64)
    drafter = tiny_drafter(tmp_path / "drafter", other)
    async with running("supervisor", *tiny_settings_argv, f"--drafter={drafter}") as up:
        assert await exit_status(up) == 2
    complaints = [line for line in up.lines if " error " in line and "drafter  " in line]
    assert len(complaints) == 1
    assert "a vocabulary of 64, target has 264" in complaints[0]


async def test_a_wrong_setting_is_one_line(tiny_settings_argv: list[str]) -> None:
    async with running("supervisor", *tiny_settings_argv, "--planer=none") as up:
        assert await exit_status(up) == 2
    (line,) = up.lines
    assert "--planer" in line
