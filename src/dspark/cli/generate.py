"""`dspark generate`: one chat answer in the terminal, and what speculation did for it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from dspark.cli.server import private_server
from dspark.core.errors import DSparkError, WorkerUnavailableError
from dspark.ops.settings import load_settings


@dataclass(frozen=True, slots=True)
class Step:
    """What one target step did for the answer."""

    tokens: int
    admitted: int
    accepted: int


@contextmanager
def server(url: str | None, console: Console) -> Iterator[str]:
    """The address of a server: the given one, or that of a private one with the workers inside."""
    if url is not None:
        yield url.rstrip("/")
        return
    settings = load_settings().model_copy(update={"transport": "inproc"})
    with private_server(settings, console) as address:
        yield address


def show(console: Console, url: str, prompt: str, *, max_tokens: int, temperature: float) -> None:
    """Print the answer as it comes, then a summary.

    Raises:
        DSparkError: there is no server, or it refused or broke off the request.
    """
    steps: list[Step] = []
    usage: dict[str, Any] = {}
    started = time.perf_counter()
    for chunk in _chunks(url, prompt, max_tokens, temperature):
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "")
            console.print(text, end="", markup=False, soft_wrap=True)
        if "dspark" in chunk:
            steps.append(Step(**chunk["dspark"]))
        usage = chunk["usage"] or usage
    seconds = time.perf_counter() - started
    console.print("\n")
    for line in summary(steps, usage, seconds):
        console.print(line, style="dim", soft_wrap=True)


def summary(steps: list[Step], usage: dict[str, Any], seconds: float) -> list[str]:
    """The lines under an answer; the four draft counters are kept apart."""
    tokens, totals = usage["completion_tokens"], usage["dspark"]
    return [
        f"{tokens} tokens in {len(steps)} steps: {tokens / len(steps):.2f} a step, "
        f"{tokens / seconds:.1f} a second",
        f"drafted {totals['proposed']}, admitted {totals['admitted']}, "
        f"trimmed {totals['proposed'] - totals['admitted']}, accepted {totals['accepted']}",
        "accepted/admitted, step by step: "
        + " ".join(f"{step.accepted}/{step.admitted}" for step in steps),
    ]


def _chunks(url: str, prompt: str, max_tokens: int, temperature: float) -> Iterator[dict[str, Any]]:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True, "dspark_steps": True},
    }
    try:
        with (
            httpx.Client(timeout=None, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise DSparkError(_message(json.loads(response.read())))
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise DSparkError(_message(chunk))
                    yield chunk
    except httpx.TransportError as error:
        raise WorkerUnavailableError(
            f"no server answers at {url} ({error}); start one with `dspark up`"
        ) from error


def _message(body: dict[str, Any]) -> str:
    return f"the server refused: {body['error']['message']}"
