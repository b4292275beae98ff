"""`dspark simulate`: planners against each other on paper, under a virtual clock."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dspark.cli.errors import one_line_errors
from dspark.core.errors import ConfigError

if TYPE_CHECKING:
    from dspark.sim.cell import StepRecord
    from dspark.sim.load import Load
    from dspark.sim.report import Summary
    from dspark.sim.simulate import Log, Scenario

_USERS = 256  # by default; also what a cell runs at once where requests come at a rate

_progress = Console(stderr=True, style="dim", highlight=False)


def simulate(
    workload: Annotated[
        str, typer.Option(help="a preset (qwen3-4b, smollm2) or a .toml file")
    ] = "qwen3-4b",
    cost: Annotated[
        str, typer.Option(help="CARD:MODEL, a .toml description, or a measured profile (.json)")
    ] = "h200:qwen3-4b",
    planners: Annotated[list[str], typer.Option("--planner", help="repeatable")] = [  # noqa: B006
        "none",
        "fixed:1",
        "causal",
        "capacity",
    ],
    requests: Annotated[int, typer.Option(min=1, help="length of the trace")] = 2000,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="users with a request each, over all cells")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="instead of users: requests a second, over all cells")
    ] = None,
    cells: Annotated[int, typer.Option(min=1, help="independent schedulers, each with a card")] = 1,
    max_running: Annotated[
        int | None, typer.Option(min=1, help="sequences of a cell; default: its users, or 256")
    ] = None,
    max_prefill_tokens: Annotated[int, typer.Option(min=1, help="prompt tokens of a step")] = 2048,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="rows of a step; default: enough for every draft")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="another seed, another trace")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for scenario and figures")] = None,
    log: Annotated[Path | None, typer.Option(help="one JSON line for every step")] = None,
) -> None:
    """What would this scheduler do under that load on that card?

    The same engine as in the server, with a virtual clock and workers. A seed fixes every request
    and every draft, so all planners meet the same ones. Default load: 256 users.
    """
    from dspark.engine.admission import Limits
    from dspark.sim.presets import load_workload
    from dspark.sim.simulate import Scenario, simulate

    with one_line_errors(), _step_log(log) as record:
        chosen = load_workload(workload)
        users = concurrency or _USERS
        running = max_running or (-(-users // cells) if rate is None else _USERS)
        scenario = Scenario(
            workload=chosen,
            load=_load(concurrency, rate),
            cost=cost,
            limits=Limits(
                max_running=running,
                max_prefill_tokens=max_prefill_tokens,
                max_batch_tokens=max_batch_tokens
                or running * (1 + chosen.block_size) + max_prefill_tokens,
            ),
            requests=requests,
            cells=cells,
            seed=seed,
        )
        summaries = []
        for planner in planners:
            started = perf_counter()
            summaries.append(simulate(scenario, planner, record))
            _progress.print(f"{planner}: simulated in {perf_counter() - started:.1f} s")
    _print(summaries)
    if out is not None:
        _write(out, scenario, summaries)


def _load(concurrency: int | None, rate: float | None) -> "Load":
    from dspark.sim.load import ClosedLoop, Poisson

    if rate is None:
        return ClosedLoop(concurrency or _USERS)
    if concurrency is not None:
        raise ConfigError("--concurrency and --rate exclude each other: users wait for answers.")
    return Poisson(rate)


@contextmanager
def _step_log(path: Path | None) -> Iterator["Log | None"]:
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The log {path} cannot be written: {error.strerror}.") from error
    with file:

        def write(planner: str, cell: int, step: "StepRecord") -> None:
            file.write(json.dumps({"planner": planner, "cell": cell, **asdict(step)}) + "\n")

        yield write


def _print(summaries: "list[Summary]") -> None:
    table = Table(
        "planner", "tok/s", "user tok/s", "p10", "ttft s", "p90", "verified", "accepted",
        "trimmed", "drafted",
    )  # fmt: skip
    by_domain = Table("planner", "domain", "requests", "user tok/s", "verified", "accepted")
    for row in summaries:
        whole = row.all
        table.add_row(
            row.planner,
            _number(row.throughput, ".0f"),
            _number(whole.user_rate, ".1f"),
            _number(whole.user_rate_p10, ".1f"),
            _number(whole.ttft, ".2f"),
            _number(whole.ttft_p90, ".2f"),
            _number(whole.verified, ".2f"),
            _number(whole.accepted, ".2f"),
            _number(whole.trimmed, ".0%"),
            _number(row.drafted, ".0%"),
        )
        for domain, figures in sorted(row.domains.items()):
            by_domain.add_row(
                row.planner,
                domain,
                str(figures.requests),
                _number(figures.user_rate, ".1f"),
                _number(figures.verified, ".2f"),
                _number(figures.accepted, ".2f"),
            )
    console = Console()
    console.print(table)
    console.print(by_domain)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _write(path: Path, scenario: "Scenario", summaries: "list[Summary]") -> None:
    content = {"scenario": asdict(scenario), "planners": [asdict(row) for row in summaries]}
    path.write_text(json.dumps(content, indent=2) + "\n")
