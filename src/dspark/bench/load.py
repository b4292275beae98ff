"""Closed loops of clients: each sends its next prompt when the last one is answered."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from dspark.core.errors import DSparkError
from dspark.data import Prompt


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished request. Seconds are those of the client's clock; the four counts are the
    server's."""

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
) -> list[Answer]:
    """Send all prompts with `concurrency` clients; their answers, in the order of the prompts.

    Raises:
        DSparkError: the server refused or broke off a request.
    """
    answers: dict[int, Answer] = {}
    await keep_asking(
        url,
        ((prompt, max_tokens) for prompt in prompts),
        answers.__setitem__,
        concurrency=min(concurrency, len(prompts)),
        temperature=temperature,
    )
    return [answers[index] for index in sorted(answers)]


async def keep_asking(
    url: str,
    questions: Iterable[tuple[Prompt, int]],
    on_answer: Callable[[int, Answer], object],
    *,
    concurrency: int,
    temperature: float,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Send prompts, each with its most tokens, by `concurrency` clients until there are no more;
    every answer is handed on with the number of its prompt. `clock` tells seconds.

    Raises:
        DSparkError: the server refused or broke off a request.
    """
    waiting = iter(enumerate(questions))
    async with api(url) as (client, model):

        async def one_client() -> None:
            for index, (prompt, max_tokens) in waiting:
                answer = await _ask(client, model, prompt, max_tokens, temperature, clock)
                on_answer(index, answer)

        await asyncio.gather(*(one_client() for _ in range(concurrency)))


async def _ask(
    client: httpx.AsyncClient,
    model: str,
    prompt: Prompt,
    max_tokens: int,
    temperature: float,
    clock: Callable[[], float],
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
    started = clock()
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
                first = clock()
    ended = clock()
    if usage is None or usage["completion_tokens"] != len(token_ids):
        raise DSparkError(f"{prompt.id} ended without all its tokens: {usage}, {len(token_ids)}")
    return Answer(
        prompt=prompt,
        token_ids=tuple(token_ids),
        seconds=ended - started,
        first_seconds=(first or ended) - started,
        **usage["dspark"],
    )
