"""`dspark evaluate exactness`: is speculative output the target's own, through all the processes?

In fp32 every answer must equal plain greedy decoding. In a lower precision a changed batch shape
may change the rounding, and the share of answers and tokens that this moved is printed instead.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.bench.load import Answer, api, closed_loop
from dspark.bench.system import running_system
from dspark.data import Prompt
from dspark.ops.settings import Settings

PLAIN = "none"
SPECULATIVE = "capacity"
ALWAYS = "fixed:4"  # never trims and never parks: every answer is made of drafts


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speculative answers against the plain ones to the same prompts."""

    precision: str
    drafter: str
    planner: str
    concurrency: int
    answers: int
    equal: int
    tokens: int  # of the plain answers
    tokens_before_first_difference: int
    accepted: int  # draft tokens that the compared answers contain
    differing: tuple[str, ...]  # ids of the prompts whose answers differ

    @property
    def exact(self) -> bool:
        return self.equal == self.answers


def compare(
    settings: Settings,
    prompts: Sequence[Prompt],
    log_file: Path,
    progress: Callable[[str], None],
    *,
    concurrencies: Sequence[int] = (1, 16),
    max_tokens: int = 128,
) -> list[Comparison]:
    """Decode plainly, as many prompts at once as ever, then speculatively at each of
    `concurrencies`.

    Above 1, other requests join and are broken off all the time while the speculative ones run.

    Raises:
        WorkerUnavailableError: the services could not be started.
    """
    comparisons = []
    with running_system(settings, (PLAIN, SPECULATIVE, ALWAYS), log_file) as urls:
        together = max(concurrencies)
        plain = asyncio.run(_answers(urls[PLAIN], prompts, together, max_tokens, churning=False))
        progress(f"{settings.precision}: {len(plain)} plain answers")
        for planner in (SPECULATIVE, ALWAYS):
            for concurrency in concurrencies:
                churning = concurrency > 1
                answers = asyncio.run(
                    _answers(urls[planner], prompts, concurrency, max_tokens, churning=churning)
                )
                result = _compared(settings, planner, concurrency, plain, answers)
                comparisons.append(result)
                progress(
                    f"{settings.precision}, {settings.drafter}, {planner}, "
                    f"concurrency {concurrency}: {result.equal} of {result.answers} equal"
                )
    return comparisons


async def _answers(
    url: str, prompts: Sequence[Prompt], concurrency: int, max_tokens: int, *, churning: bool
) -> Sequence[Answer]:
    churn = asyncio.create_task(_churn(url, prompts)) if churning else None
    try:
        return await closed_loop(
            url, prompts, concurrency=concurrency, max_tokens=max_tokens, temperature=0.0
        )
    finally:
        if churn is not None:
            churn.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await churn


async def _churn(url: str, prompts: Sequence[Prompt]) -> None:
    """Open a request, read a little of it, hang up; again and again, sampled ones among them."""
    async with api(url) as (client, model):
        number = 0
        while True:
            body = {
                "model": model,
                "prompt": prompts[number % len(prompts)].prompt[::-1],
                "max_tokens": 64,
                "temperature": float(number % 2),
                "stream": True,
            }
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.aiter_lines()
                for _ in range(4 * (1 + number % 5)):
                    await anext(lines, None)
            number += 1


def _compared(
    settings: Settings,
    planner: str,
    concurrency: int,
    plain: Sequence[Answer],
    answers: Sequence[Answer],
) -> Comparison:
    common = [_common_prefix(a.token_ids, b.token_ids) for a, b in zip(plain, answers, strict=True)]
    pairs = list(zip(plain, answers, strict=True))
    return Comparison(
        precision=settings.precision,
        drafter=settings.drafter,
        planner=planner,
        concurrency=concurrency,
        answers=len(plain),
        equal=sum(a.token_ids == b.token_ids for a, b in pairs),
        tokens=sum(a.tokens for a in plain),
        tokens_before_first_difference=sum(common),
        accepted=sum(a.accepted for a in answers),
        differing=tuple(a.prompt.id for a, b in pairs if a.token_ids != b.token_ids),
    )


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)
