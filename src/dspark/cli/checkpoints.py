"""`dspark inspect` and `dspark convert`: what a drafter's folder holds, and other forms of it."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.cli.errors import one_line_errors

Drafter = Annotated[str, typer.Argument(help="drafter folder, or the name of a packaged one")]


class Form(StrEnum):
    """What a drafter can be written as."""

    DSPARK = "dspark"
    DEEPSPEC = "deepspec"


def inspect(
    folder: Drafter,
    target: Annotated[
        str | None, typer.Option(help="also check that the drafter fits this target")
    ] = None,
) -> None:
    """Say what a drafter's folder holds, whoever wrote it."""
    from dspark.modeling.drafters.checkpoint import resolve_drafter
    from dspark.modeling.drafters.summary import summarise
    from dspark.modeling.targets import resolve_target, to_stderr

    with one_line_errors():
        home = None if target is None else resolve_target(target, progress=to_stderr)
        lines = summarise(resolve_drafter(folder), home)
    table = Table(show_header=False, title=folder)
    for what, how in lines.items():
        table.add_row(what, Text(how))
    Console().print(table)


def convert(
    folder: Drafter,
    out: Annotated[Path, typer.Argument(help="folder to write")],
    to: Annotated[Form, typer.Option(help="the form to write")],
    target: Annotated[str, typer.Option(help="the drafter's target: a name or a folder")],
) -> None:
    """Write a drafter in our own form, or in DeepSpec's.

    DeepSpec's has copies of the target's embedding and head.
    """
    from dspark.modeling.drafters.checkpoint import resolve_drafter
    from dspark.modeling.drafters.conversion import convert_drafter
    from dspark.modeling.targets import resolve_target, to_stderr

    with one_line_errors():
        home = resolve_target(target, progress=to_stderr)
        convert_drafter(resolve_drafter(folder), out, home, for_deepspec=to is Form.DEEPSPEC)
    Console(stderr=True).print(f"{folder} written to {out}", soft_wrap=True)
