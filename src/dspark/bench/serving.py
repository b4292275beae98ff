"""`dspark bench serve`: planners against each other under load, in one run on the same workers.

For every concurrency the planners take turns over the same prompts, round by round, and are
compared pair by pair: a machine that slows down half way slows both.
"""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dspark.bench.load import Answer, Load, closed_loop
from dspark.bench.scrape import StepTotals, scrape, step_totals
from dspark.bench.system import running_system
from dspark.core.errors import ConfigError
from dspark.data import Prompt
from dspark.ops.settings import Settings

BASELINE = "none"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    concurrencies: tuple[int, ...] = (1, 16)
    planners: tuple[str, ...] = (BASELINE, "causal")
    rounds: int = 3
    prompts_per_client: int = 3  # in a round; a lone client gets as many of each domain
    max_tokens: int = 128
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if BASELINE not in self.planners:
            raise ConfigError(f"--planners needs {BASELINE!r}: everything is compared with it")


@dataclass(frozen=True, slots=True)
class Slice:
    """One planner's turn in one round."""

    concurrency: int
    planner: str
    round: int
    load: Load
    totals: StepTotals


@dataclass(frozen=True, slots=True)
class Summary:
    """One planner at one concurrency, over all rounds."""

    concurrency: int
    planner: str
    tokens: int
    throughput: float  # tokens a second, all clients
    user_rate: float  # median over requests of tokens a second after the first
    ratio: float  # median over rounds of throughput / the baseline's in the same round
    lowest_ratio: float
    accepted_by_domain: dict[str, float]  # accepted length, pooled over decode steps
    verified_length: float
    accepted_length: float
    trimmed_share: float  # of the proposed tokens
    step_ms: float  # wall milliseconds of a step, at its mean batch
    batch_tokens: float
    overhead: float  # share of the wall time spent outside the two model passes
    part_ms: dict[str, float]  # milliseconds of a step by part


def run(
    settings: Settings,
    prompts: Sequence[Prompt],
    options: ServeOptions,
    log_file: Path,
    progress: Callable[[str], None],
) -> list[Summary]:
    """Measure; `prompts` are dealt out over the rounds in order, and start again if they run out.

    Raises:
        WorkerUnavailableError: the services could not be started.
        DSparkError: a request failed.
    """
    slices: list[Slice] = []
    with running_system(settings, options.planners, log_file) as urls:
        for url in urls.values():  # first touch of every buffer is not what is measured
            _answer(url, prompts[:2], 2, replace(options, max_tokens=32))
        dealer = _Dealer(prompts)
        for concurrency in options.concurrencies:
            for number in range(options.rounds):
                hand = dealer.deal(concurrency, options.prompts_per_client)
                # Who comes second would find the prompts in the verifier's prefix cache: put them
                # there for everybody.
                _answer(urls[BASELINE], hand, concurrency, replace(options, max_tokens=1))
                turns = list(urls.items())
                for planner, url in turns[:: 1 if number % 2 == 0 else -1]:
                    before = scrape(url)
                    load = _answer(url, hand, concurrency, options)
                    totals = step_totals(before, scrape(url))
                    slices.append(Slice(concurrency, planner, number, load, totals))
                    progress(
                        f"concurrency {concurrency}, round {number + 1}/{options.rounds}, "
                        f"{planner}: {load.throughput:.1f} tok/s"
                    )
    return [
        _summarise(slices, concurrency, planner)
        for concurrency in options.concurrencies
        for planner in options.planners
    ]


def to_json(settings: Settings, options: ServeOptions, summaries: list[Summary]) -> dict[str, Any]:
    return {
        "settings": settings.model_dump(mode="json"),
        "options": asdict(options),
        "results": [asdict(summary) for summary in summaries],
    }


def _answer(url: str, prompts: Sequence[Prompt], concurrency: int, options: ServeOptions) -> Load:
    return asyncio.run(
        closed_loop(
            url,
            prompts,
            concurrency=concurrency,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
        )
    )


class _Dealer:
    """Deals prompts in order, so that every round sees others and all planners see the same."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._next = 0

    def deal(self, concurrency: int, per_client: int) -> list[Prompt]:
        """Prompts for one round: a few for each client, and never less than a fair mix."""
        domains = len({prompt.domain for prompt in self._prompts})
        count = max(concurrency, domains) * per_client
        hand = [self._prompts[(self._next + i) % len(self._prompts)] for i in range(count)]
        self._next += count
        return hand


def _summarise(slices: list[Slice], concurrency: int, planner: str) -> Summary:
    own = [s for s in slices if (s.concurrency, s.planner) == (concurrency, planner)]
    base = {
        s.round: s.load.throughput
        for s in slices
        if (s.concurrency, s.planner) == (concurrency, BASELINE)
    }
    ratios = [s.load.throughput / base[s.round] for s in own]
    answers = [answer for s in own for answer in s.load.answers]
    tokens = sum(answer.tokens for answer in answers)
    seconds = sum(s.load.seconds for s in own)
    steps = sum(s.totals.steps for s in own)
    rows = [(s.totals, len(s.load.answers)) for s in own]
    proposed = sum(s.totals.proposed for s in own)
    return Summary(
        concurrency=concurrency,
        planner=planner,
        tokens=tokens,
        throughput=tokens / seconds,
        user_rate=statistics.median(answer.decode_rate for answer in answers),
        ratio=statistics.median(ratios),
        lowest_ratio=min(ratios),
        accepted_by_domain=accepted_by_domain(answers),
        verified_length=_mean([(t.verified_length, n) for t, n in rows]),
        accepted_length=_mean([(t.accepted_length, n) for t, n in rows]),
        trimmed_share=sum(s.totals.trimmed for s in own) / max(proposed, 1),
        step_ms=1e3 * seconds / steps,
        batch_tokens=_mean([(t.batch_tokens, t.steps) for t, _ in rows]),
        overhead=1 - sum(s.totals.model_seconds for s in own) / seconds,
        part_ms={
            part: 1e3 * sum(s.totals.part_seconds[part] for s in own) / steps
            for part in own[0].totals.part_seconds
        },
    )


def accepted_by_domain(answers: Sequence[Answer]) -> dict[str, float]:
    """Accepted length (the target's own token included), pooled over the decode steps of each
    domain; the token that ends the prefill is not counted."""
    result = {}
    for domain in sorted({answer.prompt.domain for answer in answers}):
        own = [a for a in answers if a.prompt.domain == domain]
        steps = sum(a.decode_steps for a in own)
        result[domain] = (sum(a.accepted for a in own) + steps) / max(steps, 1)
    return result


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in weighted) / sum(w for _, w in weighted)
