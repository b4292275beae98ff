"""`dspark evaluate compare`: drafters against each other, as tables and pictures."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dspark.cli.errors import one_line_errors
from dspark.cli.measuring import MaxTokens, Out, Prompts, Responses, Target, load_all, progress

if TYPE_CHECKING:
    from dspark.evaluation.compare import Compared


def evaluate_compare(
    drafters: Annotated[
        list[str], typer.Argument(help="drafter folders, or names of packaged ones")
    ],
    target: Target = "smollm2-135m",
    prompts: Prompts = None,
    limit: Annotated[int, typer.Option(min=1, help="how many prompts")] = 1000,
    responses: Responses = None,
    max_tokens: MaxTokens = 128,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of a draft")] = 2,
    out: Out = None,
    pictures: Annotated[Path | None, typer.Option(help="folder for pictures (.svg)")] = None,
) -> None:
    """Drafters for one target against each other: how far they get, how long they take."""
    import torch

    from dspark.evaluation.compare import measure
    from dspark.modeling.drafters.checkpoint import resolve_drafter

    torch.set_num_threads(threads)
    with one_line_errors(), tempfile.TemporaryDirectory() as scratch:
        result = measure(
            target,
            [resolve_drafter(drafter) for drafter in drafters],
            load_all(prompts)[:limit],
            responses or Path(scratch),
            max_tokens=max_tokens,
            progress=progress.print,
        )
    for table in _comparison(result):
        Console().print(table)
    if out is not None:
        out.write_text(json.dumps([asdict(own) for own in result], indent=2) + "\n")
    if pictures is not None:
        from dspark.evaluation.pictures import draw_comparison

        with one_line_errors():
            for file in draw_comparison(result, pictures):
                progress.print(f"wrote {file}", soft_wrap=True)


def _comparison(result: "Sequence[Compared]") -> list[Table]:
    """What the drafters are, what a round takes, how far they got, and where they failed."""
    made = Table("drafter", "method", "head", "layers", "drafts", "M weights", title="drafters")
    rounds = Table("drafter", title="a greedy round of so many sequences: draft + target's pass")
    for batch in result[0].draft_ms:
        rounds.add_column(f"ms at {batch}")
        rounds.add_column(f"tok/s at {batch}")
    domains = list(next(iter(result[0].lengths.values())))
    lengths = Table(
        "drafter",
        "mode",
        *domains,
        f"over {result[0].name}",
        title="accepted length, the target's own token included (95 %)",
    )
    positions = Table(
        "drafter",
        "mode",
        "acceptance",
        "ECE",
        title="by position, given all before it; all domains",
    )
    for own in result:
        made.add_row(
            own.name,
            own.method,
            own.head,
            str(own.layers),
            str(own.block_size),
            f"{own.parameters / 1e6:.1f}",
        )
        times: list[str] = []
        for batch, draft_ms in own.draft_ms.items():
            times.append(f"{draft_ms:.1f} + {own.target_ms[batch]:.1f}")
            times.append(f"{own.tokens_per_second(batch):.0f}")
        rounds.add_row(own.name, *times)
        for mode, by_domain in own.lengths.items():
            figures = (
                f"{own.accepted_length:.2f} ±{(own.high - own.low) / 2:.2f}"
                for own in by_domain.values()
            )
            gain = own.gain[mode]
            lengths.add_row(
                own.name,
                mode,
                *figures,
                f"{gain.gain:+.1%} ±{(gain.high - gain.low) / 2:.1%}",
            )
            positions.add_row(
                own.name,
                mode,
                " ".join(f"{share:.2f}" for share in by_domain["all"].conditional),
                " ".join(f"{ece:.1%}" for ece in own.ece[mode]),
            )
    return [made, rounds, lengths, positions]
