"""Errors for a person: what went wrong, no traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from dspark.core.errors import DSparkError


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one red line and status 1."""
    try:
        yield
    except DSparkError as error:
        Console(stderr=True).print(f"error: {error}", style="red", soft_wrap=True, markup=False)
        raise typer.Exit(1) from None
