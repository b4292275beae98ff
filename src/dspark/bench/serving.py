"""`dspark bench serve`: planners against each other under load, in one run on the same workers.

For every concurrency the planners take turns over the same prompts, round by round, and are
compared pair by pair: a machine that slows down half way slows both. Another transport is measured
in the same way afterwards, with workers of its own.
"""

import asyncio
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dspark.bench.load import Answer, Load, closed_loop
from dspark.bench.scrape import StepTotals, scrape, step_totals
from dspark.bench.system import running_system
from dspark.core.errors import ConfigError
from dspark.data import Prompt
from dspark.ops.settings import Settings, Transport

BASELINE = "none"
REFERENCE = "fixed:1"
"""One draft token, always verified: what production systems run as multi-token prediction."""

FEWEST_PROMPTS = 12  # of a round: a few of each domain, however few the clients
_ROUNDS_BEFORE_A_DROP = 2


@dataclass(frozen=True, slots=True)
class ServeOptions:
    transports: tuple[Transport, ...] = ("grpc",)
    concurrencies: tuple[int, ...] = (1, 16)
    planners: tuple[str, ...] = (BASELINE, "capacity")
    rounds: int = 3
    prompts_per_client: int = 3  # in a round
    max_tokens: int = 128
    temperature: float = 0.0
    drop_below: float = 0.0
    """A static planner that is slower than this share of the fastest static one at a concurrency
    has no further turns there; the baseline and REFERENCE always have."""

    def __post_init__(self) -> None:
        unknown = set(self.transports) - set(get_args(Transport))
        if unknown:
            raise ConfigError(
                f"--transport must be one of {', '.join(get_args(Transport))}, not {min(unknown)!r}"
            )
        if BASELINE not in self.planners:
            raise ConfigError(f"--planners needs {BASELINE!r}: everything is compared with it")


@dataclass(frozen=True, slots=True)
class Slice:
    """One planner's turn in one round."""

    transport: Transport
    concurrency: int
    planner: str
    round: int
    load: Load
    totals: StepTotals


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of the decode steps of some requests. Lengths count the target's own token."""

    verified: float
    accepted: float
    trimmed_share: float  # of the proposed tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """One planner at one concurrency, over all rounds."""

    transport: Transport
    concurrency: int
    planner: str
    tokens: int
    throughput: float  # tokens a second, all clients
    user_rate: float  # median over requests of tokens a second after the first
    slow_user_rate: float  # nine of ten requests are at least this fast
    ratio: float  # median over rounds of throughput / the baseline's in the same round
    lowest_ratio: float
    rounds: tuple[float, ...]  # throughput of each
    by_domain: dict[str, Lengths]
    verified_length: float  # 1 + admitted, mean over decoding rows
    accepted_length: float  # 1 + accepted, mean over decoding rows
    trimmed_share: float  # of the proposed tokens
    step_ms: float  # milliseconds of a step, at its mean batch
    batch_tokens: float
    overhead: float  # share of a step spent outside the two model passes
    part_ms: dict[str, float]  # milliseconds of a step by part


def run(
    settings: Settings,
    prompts: Sequence[Prompt],
    options: ServeOptions,
    log_file: Path,
    progress: Callable[[str], None],
) -> tuple[list[Summary], list[Answer]]:
    """Measure; `prompts` are dealt out over the rounds in order, and start again if they run out.

    Returns the summaries, and the baseline's answers.

    Raises:
        WorkerUnavailableError: the services could not be started.
        DSparkError: a request failed.
    """
    slices: list[Slice] = []
    for transport in options.transports:
        own = settings.model_copy(update={"transport": transport})
        slices += _measure(own, prompts, options, log_file, progress)
    kinds = product(options.transports, options.concurrencies, options.planners)
    plain = [a for s in slices if s.planner == BASELINE for a in s.load.answers]
    return [_summarise(slices, *kind) for kind in kinds], plain


def _measure(
    settings: Settings,
    prompts: Sequence[Prompt],
    options: ServeOptions,
    log_file: Path,
    progress: Callable[[str], None],
) -> list[Slice]:
    slices: list[Slice] = []
    transport = settings.transport
    with running_system(settings, options.planners, log_file) as urls:
        for url in urls.values():  # first touch of every buffer is not what is measured
            _answer(url, prompts[:2], 2, replace(options, max_tokens=32))
        # Over gRPC all schedulers share one verifier; in process each has its own.
        verifiers = [urls[BASELINE]] if transport == "grpc" else list(urls.values())
        dealer = _Dealer(prompts)
        for concurrency in options.concurrencies:
            rounds: dict[str, list[float]] = {planner: [] for planner in urls}
            for number in range(options.rounds):
                hand = dealer.deal(concurrency, options.prompts_per_client)
                # Who comes second would find the prompts in the verifier's prefix cache: put them
                # there for everybody.
                for url in verifiers:
                    _answer(url, hand, concurrency, replace(options, max_tokens=1))
                turns = still_racing(rounds, options.drop_below)
                for planner in turns[:: 1 if number % 2 == 0 else -1]:
                    url = urls[planner]
                    before = scrape(url)
                    load = _answer(url, hand, concurrency, options)
                    totals = step_totals(before, scrape(url))
                    slices.append(Slice(transport, concurrency, planner, number, load, totals))
                    rounds[planner].append(load.throughput)
                    progress(
                        f"{transport}, concurrency {concurrency}, "
                        f"round {number + 1}/{options.rounds}, {planner}: "
                        f"{load.throughput:.1f} tok/s"
                    )
    return slices


def is_static(planner: str) -> bool:
    """Whether it verifies alike at any load."""
    return planner == BASELINE or planner.startswith(("fixed:", "threshold:"))


def still_racing(rounds: Mapping[str, Sequence[float]], drop_below: float) -> list[str]:
    """The planners that another round is worth its time for, given the throughputs of the rounds
    that each has had so far."""
    played = len(rounds[BASELINE])
    racing = {name: sum(own) for name, own in rounds.items() if len(own) == played}
    fastest = max(rate for name, rate in racing.items() if is_static(name))
    return [
        name
        for name, rate in racing.items()
        if played < _ROUNDS_BEFORE_A_DROP
        or rate >= drop_below * fastest
        or name in (BASELINE, REFERENCE)
        or not is_static(name)
    ]


def read_summaries(file: Path) -> list[Summary]:
    """What `--out` of an earlier run kept.

    Raises:
        ConfigError: the file cannot be read, or was written by something else.
    """
    summaries = []
    try:
        for row in json.loads(file.read_text())["results"]:
            domains = {name: Lengths(**own) for name, own in row["by_domain"].items()}
            parsed = {"by_domain": domains, "rounds": tuple(row["rounds"])}
            summaries.append(Summary(**{**row, **parsed}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} holds no results of this version's `dspark bench serve --out`: {error}"
        ) from error
    return summaries


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
        """Prompts for one round."""
        count = max(concurrency * per_client, FEWEST_PROMPTS)
        hand = [self._prompts[(self._next + i) % len(self._prompts)] for i in range(count)]
        self._next += count
        return hand


def _summarise(
    slices: list[Slice], transport: Transport, concurrency: int, planner: str
) -> Summary:
    peers = [s for s in slices if (s.transport, s.concurrency) == (transport, concurrency)]
    own = [s for s in peers if s.planner == planner]
    base = {s.round: s.load.throughput for s in peers if s.planner == BASELINE}
    ratios = [s.load.throughput / base[s.round] for s in own]
    answers = [answer for s in own for answer in s.load.answers]
    rates = [answer.decode_rate for answer in answers]
    tokens = sum(answer.tokens for answer in answers)
    seconds = sum(s.load.seconds for s in own)
    steps = sum(s.totals.steps for s in own)
    rows = max(sum(s.totals.decoding_rows for s in own), 1)
    proposed = sum(s.totals.proposed for s in own)
    return Summary(
        transport=transport,
        concurrency=concurrency,
        planner=planner,
        tokens=tokens,
        throughput=tokens / seconds,
        user_rate=statistics.median(rates),
        slow_user_rate=float(np.quantile(rates, 0.1)),
        ratio=statistics.median(ratios),
        lowest_ratio=min(ratios),
        rounds=tuple(s.load.throughput for s in own),
        by_domain=by_domain(answers),
        verified_length=1 + sum(s.totals.admitted for s in own) / rows,
        accepted_length=1 + sum(s.totals.accepted for s in own) / rows,
        trimmed_share=sum(s.totals.trimmed for s in own) / max(proposed, 1),
        step_ms=1e3 * sum(s.totals.step_seconds for s in own) / steps,
        batch_tokens=sum(s.totals.batch_tokens * s.totals.steps for s in own) / steps,
        overhead=1
        - sum(s.totals.model_seconds for s in own) / sum(s.totals.step_seconds for s in own),
        part_ms={
            part: 1e3 * sum(s.totals.part_seconds[part] for s in own) / steps
            for part in own[0].totals.part_seconds
        },
    )


def by_domain(answers: Sequence[Answer]) -> dict[str, Lengths]:
    """Pooled over the decode steps of each domain; the step that ends the prefill is left out."""
    result = {}
    for domain in sorted({answer.prompt.domain for answer in answers}):
        own = [a for a in answers if a.prompt.domain == domain]
        steps = max(sum(a.decode_steps for a in own), 1)
        proposed, admitted = sum(a.proposed for a in own), sum(a.admitted for a in own)
        result[domain] = Lengths(
            verified=1 + admitted / steps,
            accepted=1 + sum(a.accepted for a in own) / steps,
            trimmed_share=1 - admitted / max(proposed, 1) if proposed else 0.0,
        )
    return result
