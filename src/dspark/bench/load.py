"""A closed loop of clients: each sends its next prompt when the last one is answered."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from dspark.core.errors import DSparkError
from dspark.data import Prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request. Seconds are the client's; the four counts are the server's."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    seconds: float  # from sending to the end
    first_seconds: float  # from sending to the first token
    steps: int  # target steps that committed tokens of it
    proposed: int
    admitted: int
    accepted: int

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first; what a reader of the stream sees."""
        return (self.tokens - 1) / max(self.seconds - self.first_seconds, 1e-9)

    @property
    def decode_steps(self) -> int:
        """Steps after the one that ended the prefill, which has no draft."""
        return self.steps - 1


@dataclass(frozen=True, slots=True)
class Load:
    """The answers of one closed loop, in the order of the prompts, and how long it took."""

    answers: tuple[Answer, ...]
    seconds: float

    @property
    def throughput(self) -> float:
        """Tokens a second, all clients together."""
        return sum(answer.tokens for answer in self.answers) / self.seconds


@asynccontextmanager
async def api(url: str) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A client of a scheduler, and the id of the model it serves."""
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        yield client, (await client.get("/v1/models")).json()["data"][0]["id"]


async def closed_loop(
    url: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    max_tokens: int,
    temperature: float = 0.0,
) -> Load:
    """Send all prompts with `concurrency` clients and wait for the answers.

    Raises:
        DSparkError: the server refused or broke off a request.
    """
    waiting = list(enumerate(prompts))[::-1]
    answers: dict[int, Answer] = {}
    async with api(url) as (client, model):

        async def one_client() -> None:
            while waiting:
                index, prompt = waiting.pop()
                answers[index] = await _ask(client, model, prompt, max_tokens, temperature)

        started = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(min(concurrency, len(prompts)))))
        seconds = time.perf_counter() - started
    return Load(tuple(answers[index] for index in sorted(answers)), seconds)


async def _ask(
    client: httpx.AsyncClient, model: str, prompt: Prompt, max_tokens: int, temperature: float
) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt.prompt}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    started = time.perf_counter()
    first = None
    token_ids: list[int] = []
    usage = None
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise DSparkError(f"{prompt.id} was refused: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise DSparkError(f"{prompt.id} broke off: {chunk['error']['message']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                token_ids += choice.get("token_ids") or ()
            if token_ids and first is None:
                first = time.perf_counter()
    ended = time.perf_counter()
    if usage is None or usage["completion_tokens"] != len(token_ids):
        raise DSparkError(f"{prompt.id} ended without all its tokens: {usage}, {len(token_ids)}")
    return Answer(
        prompt=prompt,
        token_ids=tuple(token_ids),
        seconds=ended - started,
        first_seconds=(first or ended) - started,
        **usage["dspark"],
    )
