"""`dspark bench`: measure speed, print a table, keep its numbers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from dspark.cli.errors import one_line_errors
from dspark.cli.measuring import (
    Concurrencies,
    MaxTokens,
    Out,
    Prompts,
    load_all,
    log_file,
    progress,
)
from dspark.ops.settings import load_settings

if TYPE_CHECKING:
    from dspark.bench import frontier, serving

bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@bench.command("serve")
def bench_serve(
    prompts: Prompts = None,
    concurrencies: Concurrencies = [1, 16],  # noqa: B006 - typer copies it
    planners: Annotated[
        list[str],
        typer.Option(
            "--planner",
            help="PLANNER, or PLANNER@DRAFTER for another than the settings' drafter (a name, a"
            " folder or ngram); repeatable; none is needed",
        ),
    ] = ["none", "capacity"],  # noqa: B006
    transports: Annotated[
        list[str], typer.Option("--transport", help="grpc or inproc; repeatable")
    ] = ["grpc"],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="turns of every planner")] = 30,
    turn_seconds: Annotated[float, typer.Option("--turn", min=0.1, help="seconds of a turn")] = 2.0,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    drop_below: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="after ten rounds at a load, leave out static planners slower than this share of"
            " the fastest static one",
        ),
    ] = 0.0,
    ngram_data: Annotated[
        Path | None,
        typer.Option(help="response cache to count a 4-gram table on, to compare drafts with"),
    ] = None,
    out: Out = None,
) -> None:
    """Planners, and drafters, against each other under load. Settings come from DSPARK_*
    variables."""
    from dspark.bench import serving
    from dspark.bench.table import table_scores

    with one_line_errors():
        settings = load_settings()
        options = serving.ServeOptions(
            transports=cast(Any, tuple(transports)),
            concurrencies=tuple(concurrencies),
            planners=tuple(planners),
            rounds=rounds,
            turn_seconds=turn_seconds,
            max_tokens=max_tokens,
            temperature=temperature,
            drop_below=drop_below,
        )

        def keep(found: "list[serving.Summary]", scores: dict[str, Any] | None = None) -> None:
            if out is not None:
                results = serving.to_json(settings, options, found)
                results["ngram_table"] = scores or {}
                out.write_text(json.dumps(results, indent=2) + "\n")

        summaries, plain = serving.run(
            settings, load_all(prompts), options, log_file("bench"), progress.print, keep
        )
        scores = None if ngram_data is None else table_scores(settings, ngram_data, plain)
    domains = sorted({domain for row in summaries for domain in row.by_domain})
    table = Table(
        "transport", "conc.", "planner", "tok/s", "ratio", "at least", "user tok/s", "verified",
        "accepted", "trimmed", "step ms", "overhead", *domains,
    )  # fmt: skip
    for row in summaries:
        table.add_row(
            row.transport,
            str(row.concurrency),
            row.planner,
            f"{row.throughput:.1f}",
            f"{row.ratio:.2f}",
            "-" if row.ratio_low is None else f"{row.ratio_low:.2f}",
            f"{row.user_rate:.1f}",
            f"{row.verified_length:.2f}",
            f"{row.accepted_length:.2f}",
            f"{row.trimmed_share:.0%}",
            f"{row.step_ms:.1f}",
            f"{row.overhead:.1%}",
            *(_accepted(row, domain) for domain in domains),
        )
    if scores is not None:
        blank = [""] * (len(table.columns) - len(domains) - 3)
        figures = (f"{scores[domain].accepted_length:.2f}" for domain in domains)
        table.add_row("", "", "4-gram table", *blank, *figures)
    Console().print(table)
    if scores is not None:
        keep(summaries, {name: asdict(score) for name, score in scores.items()})


@bench.command("planner")
def bench_planner(
    planners: Annotated[
        list[str] | None, typer.Option("--planner", help="repeatable; default: one of each kind")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="timed calls")] = 200,
    out: Out = None,
) -> None:
    """How long planning a step takes, by number of requests and block size."""
    from dspark.bench import planner as timing
    from dspark.core.planner import parse_planner

    with one_line_errors():
        chosen = [parse_planner(name) for name in planners or timing.PLANNERS]
    times = timing.measure(chosen, timing.SIZES, repeats)
    table = Table(
        "R", "block", "planner", "before draft ms", "after ms", "no sampling ms", "step ms",
        "verified",
        title=f"planning: CPU ms of one core, median of {repeats} calls; room for whole blocks",
    )  # fmt: skip
    for row in times:
        table.add_row(
            str(row.requests),
            str(row.block_size),
            row.planner,
            f"{row.outlook_ms:.3f}",
            f"{row.plan_ms:.3f}",
            f"{row.determined_ms:.3f}",
            f"{row.step_ms:.3f}",
            f"{row.verified_length:.2f}",
        )
    Console().print(table)
    if out is not None:
        results = {"repeats": repeats, "cost": asdict(timing.COST)}
        results["times"] = [asdict(row) | {"step_ms": row.step_ms} for row in times]
        out.write_text(json.dumps(results, indent=2) + "\n")


@bench.command("report")
def bench_report(
    results: Annotated[list[Path], typer.Argument(help="files that `bench serve --out` wrote")],
    pictures: Annotated[Path | None, typer.Option(help="folder for pictures (.svg)")] = None,
    interactivity: Annotated[
        list[float], typer.Option(help="tokens a second a user must get; repeatable")
    ] = [4, 8, 16],  # noqa: B006
) -> None:
    """What results of `bench serve` say about planners: throughput over the best static setting's,
    speed at equal throughput, and how many users each can serve at a speed."""
    from dspark.bench import frontier, serving

    with one_line_errors():
        runs = [serving.read_summaries(file) for file in results]
        rows = list(chain.from_iterable(runs))
        _print_rivalries(list(chain.from_iterable(map(frontier.rivalries, runs))))
        _print_matched(frontier.matched(rows))
        _print_interactive(frontier.interactive(rows, interactivity))
        if pictures is not None:
            from dspark.bench.pictures import draw

            for file in draw(rows, pictures):
                progress.print(f"wrote {file}", soft_wrap=True)


def _print_rivalries(found: "Sequence[frontier.Rivalry]") -> None:
    table = Table(
        "transport", "conc.", "planner", "best static", "ratio", "at least",
        title="throughput over that of the best static setting, paired by round (95 %)",
    )  # fmt: skip
    for row in found:
        table.add_row(
            row.transport,
            str(row.concurrency),
            row.planner,
            row.rival,
            f"{row.ratio:.3f}",
            "-" if row.low is None else f"{row.low:.3f}",
        )
    if found:
        Console().print(table)


def _print_matched(matches: "Sequence[frontier.Match]") -> None:
    table = Table(
        "transport", "reference", "conc.", "tok/s", "user tok/s", "planner", "user tok/s", "gain",
        title="user speed at the throughput of the reference (one draft token, always verified)",
    )  # fmt: skip
    for match in matches:
        table.add_row(
            match.transport,
            match.reference,
            str(match.concurrency),
            f"{match.throughput:.1f}",
            f"{match.reference_rate:.1f}",
            match.planner,
            f"{match.user_rate:.1f}",
            f"{match.user_rate / match.reference_rate - 1:+.0%}",
        )
    if matches:
        Console().print(table)


def _print_interactive(found: "Sequence[frontier.Interactive]") -> None:
    table = Table(
        "transport", "user tok/s", "planner", "users", "tok/s",
        title="most users measured of whom nine in ten get that speed",
    )  # fmt: skip
    for row in found:
        table.add_row(
            row.transport,
            f"{row.target:g}",
            row.planner,
            str(row.users) if row.users else "none",
            f"{row.throughput:.1f}",
        )
    Console().print(table)


def _accepted(row: "serving.Summary", domain: str) -> str:
    return f"{row.by_domain[domain].accepted:.2f}" if domain in row.by_domain else "-"
