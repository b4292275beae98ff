"""What measuring commands share: their options, and where prompts and logs are."""

import tempfile
from collections.abc import Iterable
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.data import Prompt, load_prompts

Target = Annotated[str, typer.Option(help="the target, whose drafter it is")]
Responses = Annotated[
    Path | None, typer.Option(help="folder to keep the target's answers in; default: none")
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(help="a .jsonl file or data set; repeatable; default: the packaged prompts"),
]
Out = Annotated[Path | None, typer.Option(help="JSON file for settings and numbers")]
Picture = Annotated[Path | None, typer.Option(help="file for a picture: .svg or .png")]
Concurrencies = Annotated[list[int], typer.Option("--concurrency", min=1, help="repeatable")]
MaxTokens = Annotated[int, typer.Option(min=1, help="longest answer")]

progress = Console(stderr=True, style="dim", highlight=False)


def load_all(sources: Iterable[str] | None) -> list[Prompt]:
    """The prompts of all sources, in turns, so that any beginning is a mix."""
    loaded = [load_prompts(source) for source in sources] if sources else [load_prompts()]
    return [prompt for prompt in chain.from_iterable(zip_longest(*loaded)) if prompt is not None]


def log_file(name: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix=f"dspark-{name}-")) / "services.log"
    progress.print(f"the services write to {path}", soft_wrap=True)
    return path
