"""`dspark bench` and `dspark evaluate`: run a measurement, print its table, keep its numbers."""

import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from dspark.cli.errors import one_line_errors
from dspark.data import Prompt, load_prompts
from dspark.ops.settings import load_settings

bench = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)
evaluate = typer.Typer(help="Measure what comes out.", no_args_is_help=True)

Prompts = Annotated[
    list[str] | None,
    typer.Option(help="a .jsonl file or data set; repeatable; default: the packaged prompts"),
]
Out = Annotated[Path | None, typer.Option(help="JSON file for settings and numbers")]
Concurrencies = Annotated[list[int], typer.Option("--concurrency", min=1, help="repeatable")]
MaxTokens = Annotated[int, typer.Option(min=1, help="longest answer")]

_progress = Console(stderr=True, style="dim", highlight=False)


@bench.command("serve")
def bench_serve(
    prompts: Prompts = None,
    concurrencies: Concurrencies = [1, 16],  # noqa: B006 - typer copies it
    planners: Annotated[list[str], typer.Option("--planner", help="repeatable; none is needed")] = [  # noqa: B006
        "none",
        "causal",
    ],
    transports: Annotated[
        list[str], typer.Option("--transport", help="grpc or inproc; repeatable")
    ] = ["grpc"],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="turns of every planner")] = 3,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy")] = 0.0,
    ngram_data: Annotated[
        Path | None,
        typer.Option(help="response cache to count a 4-gram table on, to compare drafts with"),
    ] = None,
    out: Out = None,
) -> None:
    """Planners against each other under load. Settings come from DSPARK_* variables."""
    from dspark.bench import serving
    from dspark.bench.table import table_scores

    with one_line_errors():
        settings = load_settings()
        options = serving.ServeOptions(
            transports=cast(Any, tuple(transports)),
            concurrencies=tuple(concurrencies),
            planners=tuple(planners),
            rounds=rounds,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        summaries, plain = serving.run(
            settings, _load(prompts), options, _log_file("bench"), _progress.print
        )
        scores = None if ngram_data is None else table_scores(settings, ngram_data, plain)
    domains = sorted({domain for row in summaries for domain in row.accepted_by_domain})
    table = Table(
        "transport", "conc.", "planner", "tok/s", "ratio", "lowest", "user tok/s", "verified",
        "accepted", "trimmed", "step ms", "overhead", *domains,
    )  # fmt: skip
    for row in summaries:
        table.add_row(
            row.transport,
            str(row.concurrency),
            row.planner,
            f"{row.throughput:.1f}",
            f"{row.ratio:.2f}",
            f"{row.lowest_ratio:.2f}",
            f"{row.user_rate:.1f}",
            f"{row.verified_length:.2f}",
            f"{row.accepted_length:.2f}",
            f"{row.trimmed_share:.0%}",
            f"{row.step_ms:.1f}",
            f"{row.overhead:.1%}",
            *(f"{row.accepted_by_domain.get(domain, float('nan')):.2f}" for domain in domains),
        )
    if scores is not None:
        blank = [""] * (len(table.columns) - len(domains) - 3)
        figures = (f"{scores[domain].accepted_length:.2f}" for domain in domains)
        table.add_row("", "", "4-gram table", *blank, *figures)
    Console().print(table)
    if out is not None:
        results = serving.to_json(settings, options, summaries)
        results["ngram_table"] = {name: asdict(score) for name, score in (scores or {}).items()}
        out.write_text(json.dumps(results, indent=2) + "\n")


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


@evaluate.command("exactness")
def evaluate_exactness(
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="how many prompts")] = 64,
    precisions: Annotated[
        list[str], typer.Option("--precision", help="repeatable; fp32 has to be exact")
    ] = ["fp32", "auto"],  # noqa: B006
    concurrencies: Concurrencies = [1, 16],  # noqa: B006
    max_tokens: MaxTokens = 128,
    out: Out = None,
) -> None:
    """Is speculative output the target's own? Fails if it is not in fp32."""
    from dspark.bench.exactness import compare

    results = []
    with one_line_errors():
        chosen = _load(prompts)[:limit]
        for precision in precisions:
            results += compare(
                load_settings([f"--precision={precision}"]),
                chosen,
                _log_file("exactness"),
                _progress.print,
                concurrencies=concurrencies,
                max_tokens=max_tokens,
            )
    table = Table(
        "precision", "planner", "conc.", "equal answers", "tokens up to a difference", "accepted"
    )
    for row in results:
        table.add_row(
            row.precision,
            row.planner,
            str(row.concurrency),
            f"{row.equal} of {row.answers}",
            f"{row.tokens_before_first_difference} of {row.tokens}",
            str(row.accepted),
        )
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in results], indent=2) + "\n")
    if not all(row.exact for row in results if row.precision == "fp32"):
        raise typer.Exit(1)


@evaluate.command("acceptance")
def evaluate_acceptance(
    drafter: Annotated[
        str, typer.Option(help="drafter folder, or the name of a packaged one")
    ] = "smollm2-135m-dspark",
    target: Annotated[str, typer.Option(help="its target")] = "smollm2-135m",
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="how many prompts")] = 1000,
    training_data: Annotated[
        Path | None, typer.Option(help="response cache to count the 4-gram table on")
    ] = None,
    responses: Annotated[
        Path | None, typer.Option(help="folder to keep the target's answers in; default: none")
    ] = None,
    max_tokens: MaxTokens = 128,
    out: Out = None,
) -> None:
    """Accepted length (the target's own token included) by domain, beside a 4-gram table's."""
    from dspark.evaluation.acceptance import measure
    from dspark.modeling.drafters.checkpoint import resolve_drafter

    with one_line_errors(), tempfile.TemporaryDirectory() as scratch:
        result = measure(
            target,
            resolve_drafter(drafter),
            _load(prompts)[:limit],
            responses or Path(scratch),
            training_data=training_data,
            max_tokens=max_tokens,
            progress=_progress.print,
        )
    table = Table("domain", "rounds", "accepted length", "by position", "4-gram table")
    for domain, score in result.drafter.items():
        table.add_row(
            domain,
            str(score.rounds),
            f"{score.accepted_length:.2f}",
            " ".join(f"{share:.2f}" for share in score.acceptance),
            f"{result.table[domain].accepted_length:.2f}" if result.table else "-",
        )
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(asdict(result), indent=2) + "\n")


def _load(sources: Iterable[str] | None) -> list[Prompt]:
    """The prompts of all sources, in turns, so that any beginning is a mix."""
    loaded = [load_prompts(source) for source in sources] if sources else [load_prompts()]
    return [prompt for prompt in chain.from_iterable(zip_longest(*loaded)) if prompt is not None]


def _log_file(name: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix=f"dspark-{name}-")) / "services.log"
    _progress.print(f"the services write to {path}", soft_wrap=True)
    return path
