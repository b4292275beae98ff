"""The `dspark` command. Nothing heavy is imported before a command needs it."""

import runpy
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dspark.cli.bench import bench
from dspark.cli.checkpoints import convert, inspect
from dspark.cli.errors import one_line_errors
from dspark.cli.evaluate import evaluate
from dspark.cli.simulate import simulate

app = typer.Typer(
    help="Speculative decoding as a serving decision.", no_args_is_help=True, add_completion=False
)
train = typer.Typer(help="Make a drafter: prompts, responses, training.", no_args_is_help=True)
app.add_typer(train, name="train")
app.add_typer(evaluate, name="evaluate")
app.add_typer(bench, name="bench")
app.command()(simulate)
app.command()(inspect)
app.command()(convert)

# Commands whose module has a command line of its own: (group, name, module, what it does).
_MODULES = (
    (app, "up", "dspark_services.supervisor", "Start drafter, verifier and scheduler here."),
    (app, "calibrate", "dspark.training.calibrate", "Fit a drafter's confidences."),
    (train, "user-turns", "dspark.training.user_turns", "Let the target write chat prompts."),
    (train, "regenerate", "dspark.training.regenerate", "Let the target answer prompts."),
    (train, "cache", "dspark.training.cache", "Take in answers that were made elsewhere."),
    (train, "fit", "dspark.training.fit", "Train a drafter on the answers; resumes."),
    (train, "export", "dspark.training.export", "Make a checkpoint folder of a training run."),
)


def _add_module(group: typer.Typer, name: str, module: str, meaning: str) -> None:
    """A command that hands all its arguments, --help included, to `python -m module`."""

    def run(context: typer.Context) -> None:
        sys.argv = [f"dspark {name}", *context.args]
        with one_line_errors():
            runpy.run_module(module, run_name="__main__", alter_sys=True)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    group.command(name, help=meaning, context_settings=settings)(run)


for _entry in _MODULES:
    _add_module(*_entry)


class Domain(StrEnum):
    """What training prompts can be generated for."""

    CODE = "code"
    CHAT = "chat"


@train.command("prompts")
def write_prompts(
    domain: Annotated[Domain, typer.Argument(help="what the prompts ask for")],
    out: Annotated[Path, typer.Option(help="JSON-lines file to write")],
    count: Annotated[int, typer.Option(min=1, help="how many distinct prompts")] = 1000,
    seed: Annotated[int, typer.Option(help="another seed, other prompts")] = 0,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="prompts that must not appear: a .jsonl file or data set; repeatable"),
    ] = None,
) -> None:
    """Write training prompts made from templates; the packaged prompt sets are never among them."""
    from dspark.data import load_prompts, save_prompts
    from dspark.training.prompts import chat_prompts, code_prompts, hashes

    make = {Domain.CODE: code_prompts, Domain.CHAT: chat_prompts}[domain]
    with one_line_errors():
        excluded = frozenset().union(*(hashes(load_prompts(name)) for name in exclude or []))
        save_prompts(out, make(count, seed, excluded))
    Console(stderr=True).print(f"{count} {domain} prompts written to {out}", soft_wrap=True)


@app.command("profile")
def measure_costs() -> None:
    """Measure anew what steps cost on this machine, show it, and keep it for the next start.

    Settings come from DSPARK_* variables; the profile goes where DSPARK_STATE says.
    """
    from dspark.cli.profile import measure_anew, tables
    from dspark.ops.settings import load_settings

    with one_line_errors():
        cost = measure_anew(load_settings(), Console(stderr=True))
    for table in tables(cost):
        Console().print(table)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="what to ask the model")],
    url: Annotated[
        str | None,
        typer.Option(help="a running server; without it, one is started for this prompt"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.0,
) -> None:
    """Stream an answer, then show what each step admitted and accepted.

    A server started for the prompt takes its settings from DSPARK_* variables.
    """
    from dspark.cli.generate import server, show

    console = Console(highlight=False)
    with one_line_errors(), server(url, console) as address:
        show(console, address, prompt, max_tokens=max_tokens, temperature=temperature)
