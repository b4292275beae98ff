"""`dspark bench serve`: planners, and drafters, against each other under load, in one run.

Every contender has a system of its own, and clients who ask the same prompts in the same order. For
every concurrency the systems take turns of a few seconds, round by round: a machine that slows down
slows them all, and none has to be filled or drained. Another transport is measured in the same way
afterwards.
"""

import asyncio
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dspark.bench.contenders import BASELINE, Contender, parse_contenders
from dspark.bench.load import Answer
from dspark.bench.racer import Turn, racer
from dspark.bench.rounds import paired_ratio
from dspark.bench.system import running_system
from dspark.core.errors import ConfigError
from dspark.data import Prompt
from dspark.ops.settings import Settings, Transport

_ROUNDS_BEFORE_A_DROP = 10


@dataclass(frozen=True, slots=True)
class ServeOptions:
    transports: tuple[Transport, ...] = ("grpc",)
    concurrencies: tuple[int, ...] = (1, 16)
    planners: tuple[str, ...] = (BASELINE, "capacity")  # or PLANNER@DRAFTER
    rounds: int = 30
    turn_seconds: float = 2.0
    max_tokens: int = 128
    temperature: float = 0.0
    drop_below: float = 0.0
    """A static planner that is slower than this share of the fastest static one with its drafter
    at a concurrency has no further turns there; the baseline and the reference always have."""

    def __post_init__(self) -> None:
        unknown = set(self.transports) - set(get_args(Transport))
        if unknown:
            raise ConfigError(
                f"--transport must be one of {', '.join(get_args(Transport))}, not {min(unknown)!r}"
            )
        parse_contenders(self.planners)


@dataclass(frozen=True, slots=True)
class Run:
    """One contender at one concurrency: its turns, one a round, and what was answered in them."""

    transport: Transport
    concurrency: int
    planner: str  # the contender's name: with an @ and its drafter, if one was named
    turns: list[Turn]
    answers: list[Answer]

    @property
    def rounds(self) -> tuple[float, ...]:
        """Throughput of each turn."""
        return tuple(turn.throughput for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of the decode steps of some requests. Lengths count the target's own token."""

    verified: float
    accepted: float
    trimmed_share: float  # of the proposed tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """One contender at one concurrency, over all rounds."""

    transport: Transport
    concurrency: int
    planner: str  # as in Run
    tokens: int
    throughput: float  # tokens a second, all clients
    user_rate: float  # median over requests of tokens a second after the first
    slow_user_rate: float  # nine of ten requests are at least this fast
    ratio: float  # of throughput to the baseline's in the same rounds
    ratio_low: float | None  # lower end of its 95 % interval; None: too few rounds for one
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
    keep: Callable[[list[Summary]], None],
) -> tuple[list[Summary], list[Answer]]:
    """Measure; after every concurrency `keep` is given the summaries so far. Returns all of them,
    and the baseline's answers.

    Raises:
        WorkerUnavailableError: the services could not be started.
        DSparkError: a request failed.
    """
    summaries: list[Summary] = []
    plain: list[Answer] = []
    for transport in options.transports:
        with ExitStack() as systems:
            urls: dict[str, str] = {}
            for contender in parse_contenders(options.planners):
                own = settings.model_copy(
                    update={
                        "transport": transport,
                        "pausable": True,
                        "drafter": contender.drafter or settings.drafter,
                    }
                )
                planner = contender.planner
                started = systems.enter_context(running_system(own, (planner,), log_file))
                urls[contender.name] = started[planner]
                progress(f"{transport}, {contender.name}: ready")
            for concurrency in options.concurrencies:
                runs = {planner: Run(transport, concurrency, planner, [], []) for planner in urls}
                asyncio.run(_race(urls, runs, prompts, options, progress))
                summaries += [_summarise(run, runs[BASELINE]) for run in runs.values()]
                plain += runs[BASELINE].answers
                keep(summaries)
    return summaries, plain


async def _race(
    urls: Mapping[str, str],
    runs: Mapping[str, Run],
    prompts: Sequence[Prompt],
    options: ServeOptions,
    progress: Callable[[str], None],
) -> None:
    """All planners at one concurrency; adds to their `runs`."""
    async with AsyncExitStack() as stack:
        racers = {
            planner: await stack.enter_async_context(
                racer(
                    urls[planner],
                    prompts,
                    run.answers,
                    concurrency=run.concurrency,
                    max_tokens=options.max_tokens,
                    temperature=options.temperature,
                )
            )
            for planner, run in runs.items()
        }
        rng, last = np.random.default_rng(0), ""
        for number in range(options.rounds):
            racing = still_racing({name: run.rounds for name, run in runs.items()}, options)
            for planner in in_turns(racing, last, rng):
                run, last = runs[planner], planner
                run.turns.append(await racers[planner].turn(options.turn_seconds))
                progress(
                    f"{run.transport}, concurrency {run.concurrency}, "
                    f"round {number + 1}/{options.rounds}, {planner}: "
                    f"{run.turns[-1].throughput:.1f} tok/s"
                )


def in_turns(planners: Sequence[str], last: str, rng: np.random.Generator) -> list[str]:
    """The planners in random order, but not `last` first where there is another.

    Random, because the machine may have a rhythm of its own. And whoever went on would gain by it:
    of two turns in a row the second was measured 5 to 15 % faster.
    """
    order = [planners[index] for index in rng.permutation(len(planners))]
    if order[0] == last and len(order) > 1:
        other = int(rng.integers(1, len(order)))
        order[0], order[other] = order[other], order[0]
    return order


def still_racing(rounds: Mapping[str, Sequence[float]], options: ServeOptions) -> list[str]:
    """The planners that another round is worth its time for, given the throughputs of the rounds
    that each has had so far."""
    played = len(rounds[BASELINE])
    racing = {Contender.parse(name): sum(own) for name, own in rounds.items() if len(own) == played}

    def is_worth_it(contender: Contender) -> bool:
        if contender.planner == BASELINE or contender.is_reference or not contender.is_static:
            return True
        fastest = max(rate for own, rate in racing.items() if own.is_static_beside(contender))
        return racing[contender] >= options.drop_below * fastest

    return [
        contender.name
        for contender in racing
        if played < _ROUNDS_BEFORE_A_DROP or is_worth_it(contender)
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


def _summarise(run: Run, baseline: Run) -> Summary:
    ratio, low = paired_ratio(run.rounds, baseline.rounds)
    rates = [answer.decode_rate for answer in run.answers] or [0.0]
    totals = [turn.totals for turn in run.turns]
    seconds = sum(turn.seconds for turn in run.turns)
    tokens = sum(own.tokens for own in totals)
    steps = sum(own.steps for own in totals)
    step_seconds = sum(own.step_seconds for own in totals)
    rows = max(sum(own.decoding_rows for own in totals), 1)
    proposed = sum(own.proposed for own in totals)
    return Summary(
        transport=run.transport,
        concurrency=run.concurrency,
        planner=run.planner,
        tokens=round(tokens),
        throughput=tokens / seconds,
        user_rate=statistics.median(rates),
        slow_user_rate=float(np.quantile(rates, 0.1)),
        ratio=ratio,
        ratio_low=low,
        rounds=run.rounds,
        by_domain=by_domain(run.answers),
        verified_length=1 + sum(own.admitted for own in totals) / rows,
        accepted_length=1 + sum(own.accepted for own in totals) / rows,
        trimmed_share=sum(own.trimmed for own in totals) / max(proposed, 1),
        step_ms=1e3 * step_seconds / steps,
        batch_tokens=sum(own.batch_tokens * own.steps for own in totals) / steps,
        overhead=1 - sum(own.model_seconds for own in totals) / step_seconds,
        part_ms={
            part: 1e3 * sum(own.part_seconds[part] for own in totals) / steps
            for part in totals[0].part_seconds
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
