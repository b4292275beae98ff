"""`dspark evaluate`: measure what comes out, print a table, keep its numbers."""

import json
import tempfile
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dspark.cli.compare import evaluate_compare
from dspark.cli.errors import one_line_errors
from dspark.cli.measuring import (
    Concurrencies,
    MaxTokens,
    Out,
    Picture,
    Prompts,
    Responses,
    Target,
    load_all,
    log_file,
    progress,
)
from dspark.ops.settings import load_settings

evaluate = typer.Typer(help="Measure what comes out.", no_args_is_help=True)

Drafter = Annotated[str, typer.Option(help="drafter folder, or the name of a packaged one")]


@evaluate.command("exactness")
def evaluate_exactness(
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="how many prompts")] = 64,
    precisions: Annotated[
        list[str], typer.Option("--precision", help="repeatable; fp32 has to be exact")
    ] = ["fp32", "auto"],  # noqa: B006
    drafters: Annotated[
        list[str] | None,
        typer.Option("--drafter", help="repeatable; default: the one of the settings"),
    ] = None,
    concurrencies: Concurrencies = [1, 16],  # noqa: B006
    max_tokens: MaxTokens = 128,
    out: Out = None,
) -> None:
    """Is speculative output the target's own? Fails if it is not in fp32."""
    from dspark.bench.exactness import compare

    results = []
    with one_line_errors():
        chosen = load_all(prompts)[:limit]
        for precision, drafter in product(precisions, drafters or [load_settings([]).drafter]):
            results += compare(
                load_settings([f"--precision={precision}", f"--drafter={drafter}"]),
                chosen,
                log_file("exactness"),
                progress.print,
                concurrencies=concurrencies,
                max_tokens=max_tokens,
            )
    table = Table(
        "precision", "drafter", "planner", "conc.", "equal answers", "tokens up to a difference",
        "accepted",
    )  # fmt: skip
    for row in results:
        table.add_row(
            row.precision,
            Path(row.drafter).name,
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


@evaluate.command("law")
def evaluate_law(
    prompt: Annotated[str, typer.Option(help="what the answers continue")] = "The weather today is",
    draws: Annotated[int, typer.Option(min=100, help="answers with each planner")] = 5000,
    precision: Annotated[str, typer.Option(help="lower ones round differently by batch")] = "fp32",
    out: Out = None,
) -> None:
    """Does sampled output follow the target's own distribution? Fails if it does not."""
    from dspark.bench import law

    with one_line_errors():
        settings = load_settings([f"--precision={precision}"])
        drawn = law.draw(settings, prompt, draws, log_file("law"), progress.print)
        exact = law.exact_law(settings, prompt)
        p_values = [own.p_value(exact) for own in drawn]
    table = Table(
        "planner", "draws", "outcomes", "accepted drafts", "tested", "p-value",
        title=f"chi-square of sampled beginnings; below {law.SIGNIFICANCE:g} they are not the "
        "target's",
    )  # fmt: skip
    for own, p_value in zip(drawn, p_values, strict=True):
        table.add_row(
            own.planner,
            str(draws),
            str(len(exact)),
            str(own.accepted),
            own.tested,
            f"{p_value:.3g}",
        )
    Console().print(table)
    if out is not None:
        rows = [
            {"planner": own.planner, "draws": draws, "accepted": own.accepted, "p_value": p_value}
            for own, p_value in zip(drawn, p_values, strict=True)
        ]
        out.write_text(json.dumps(rows, indent=2) + "\n")
    if min(p_values) < law.SIGNIFICANCE:
        raise typer.Exit(1)


@evaluate.command("acceptance")
def evaluate_acceptance(
    drafter: Drafter = "smollm2-135m-dspark",
    target: Target = "smollm2-135m",
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="how many prompts")] = 1000,
    training_data: Annotated[
        Path | None, typer.Option(help="response cache to count the 4-gram table on")
    ] = None,
    responses: Responses = None,
    max_tokens: MaxTokens = 128,
    out: Out = None,
    picture: Picture = None,
) -> None:
    """Accepted length (the target's own token included) by domain, beside a 4-gram table's."""
    from dspark.evaluation.acceptance import measure
    from dspark.modeling.drafters.checkpoint import resolve_drafter

    with one_line_errors(), tempfile.TemporaryDirectory() as scratch:
        result = measure(
            target,
            resolve_drafter(drafter),
            load_all(prompts)[:limit],
            responses or Path(scratch),
            training_data=training_data,
            max_tokens=max_tokens,
            progress=progress.print,
        )
    table = Table(
        "domain", "rounds", "accepted length", "by position", "without Markov head", "by position",
        "4-gram table", "lookup alone", "drafter and lookup",
    )  # fmt: skip
    for domain, score in result.drafter.items():
        parallel = result.without_markov[domain]
        table.add_row(
            domain,
            str(score.rounds),
            f"{score.accepted_length:.2f}",
            " ".join(f"{share:.2f}" for share in score.acceptance),
            f"{parallel.accepted_length:.2f}",
            " ".join(f"{share:.2f}" for share in parallel.acceptance),
            f"{result.table[domain].accepted_length:.2f}" if result.table else "-",
            f"{result.lookup_alone[domain].accepted_length:.2f}",
            f"{result.with_lookup[domain].accepted_length:.2f}",
        )
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(asdict(result), indent=2) + "\n")
    if picture is not None:
        from dspark.evaluation.pictures import draw_acceptance

        with one_line_errors():
            draw_acceptance(result, picture)


@evaluate.command("calibration")
def evaluate_calibration(
    drafter: Drafter = "smollm2-135m-dspark",
    target: Target = "smollm2-135m",
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="how many prompts")] = 1000,
    responses: Responses = None,
    max_tokens: MaxTokens = 128,
    out: Out = None,
    picture: Picture = None,
) -> None:
    """How far the drafter's confidences can be believed, before and after temperature scaling."""
    from dspark.evaluation.calibration import measure
    from dspark.modeling.drafters.checkpoint import resolve_drafter

    with one_line_errors(), tempfile.TemporaryDirectory() as scratch:
        result = measure(
            target,
            resolve_drafter(drafter),
            load_all(prompts)[:limit],
            responses or Path(scratch),
            max_tokens=max_tokens,
            progress=progress.print,
        )
    table = Table(
        "mode", "position", "blocks", "temperature", "intercept", "ECE before", "ECE after",
        "of a perfect model", "Brier before", "Brier after", "AUC",
        title="survival through each position against what was accepted",
    )  # fmt: skip
    for mode, both in result.items():
        for k, (before, after) in enumerate(
            zip(both.before.scores, both.after.scores, strict=True)
        ):
            table.add_row(
                mode,
                str(k + 1),
                str(after.count),
                f"{both.after.scaling.temperatures[k]:.2f}",
                f"{both.after.scaling.intercepts[k]:+.2f}",
                f"{before.ece:.1%}",
                f"{after.ece:.1%}",
                f"{after.ece_floor:.1%}",
                f"{before.brier:.3f}",
                f"{after.brier:.3f}",
                "-" if after.auc is None else f"{after.auc:.3f}",
            )
    Console().print(table)
    if out is not None:
        kept = {
            mode: {
                when: {
                    **asdict(own.scaling),
                    "positions": [asdict(scores) for scores in own.scores],
                }
                for when, own in (("before", both.before), ("after", both.after))
            }
            for mode, both in result.items()
        }
        out.write_text(json.dumps(kept, indent=2) + "\n")
    if picture is not None:
        from dspark.evaluation.pictures import draw_calibration

        with one_line_errors():
            draw_calibration(result, picture)


@evaluate.command("threshold")
def evaluate_threshold(
    drafter: Drafter = "smollm2-135m-dspark",
    target: Target = "smollm2-135m",
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="how many prompts")] = 1000,
    thresholds: Annotated[
        list[float] | None,
        typer.Option("--threshold", min=0, max=1, help="repeatable; default: a sweep from 0"),
    ] = None,
    responses: Responses = None,
    max_tokens: MaxTokens = 128,
    out: Out = None,
    picture: Picture = None,
) -> None:
    """What fixed cuts of the survival would verify, and what of it is kept, by domain."""
    from dspark.evaluation.threshold import THRESHOLDS, measure
    from dspark.modeling.drafters.checkpoint import resolve_drafter

    with one_line_errors(), tempfile.TemporaryDirectory() as scratch:
        result = measure(
            target,
            resolve_drafter(drafter),
            load_all(prompts)[:limit],
            responses or Path(scratch),
            thresholds or THRESHOLDS,
            max_tokens=max_tokens,
            progress=progress.print,
        )
    table = Table("domain", "threshold", "rounds", "verified", "accepted", "kept of the drafts")
    for domain, cuts in result.items():
        for cut in cuts:
            table.add_row(
                domain,
                f"{cut.threshold:g}",
                str(cut.rounds),
                f"{cut.verified:.2f}",
                f"{cut.accepted:.2f}",
                f"{cut.kept_share:.0%}",
            )
    Console().print(table)
    if out is not None:
        kept = {domain: [asdict(cut) for cut in cuts] for domain, cuts in result.items()}
        out.write_text(json.dumps(kept, indent=2) + "\n")
    if picture is not None:
        from dspark.evaluation.pictures import draw_thresholds

        with one_line_errors():
            draw_thresholds(result, picture)


evaluate.command("compare")(evaluate_compare)
