"""Prompt sets: the packaged ones, JSON Lines files, and Hugging Face data sets."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import chain, islice
from pathlib import Path

from dspark.core.errors import PromptError

DOMAINS = ("math", "code", "chat")


@dataclass(frozen=True)
class Prompt:
    """One user turn. `domain` groups prompts in reports (math, code, chat, or a file's stem)."""

    id: str
    domain: str
    prompt: str


def load_prompts(
    source: str | None = None, domain: str | None = None, limit: int | None = None
) -> list[Prompt]:
    """Read at most `limit` prompts, in the order of the source.

    source: None for the packaged sets, their domains in turn; a path that ends in .jsonl, one
    object with a `prompt` (and perhaps an `id` and a `domain`, by default the file's stem) a
    line; anything else is a Hugging Face data set id, of which the `train` split's `prompt`
    column is read. domain: keep only the prompts of this domain.

    Raises PromptError: unreadable file or bad line (named), missing `datasets` package or
    column, or nothing left to return.
    """
    if source is None:
        prompts = _packaged()
    elif source.endswith(".jsonl"):
        prompts = _parse(Path(source).stem, source, _read(source))
    else:
        prompts = _from_hub(source)
    kept = list(islice((p for p in prompts if domain in (None, p.domain)), limit))
    if not kept:
        wanted = f" of domain {domain!r}" if domain else ""
        raise PromptError(f"{source or 'The packaged sets'}: there are no prompts{wanted}.")
    return kept


def save_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Write prompts as JSON Lines that `load_prompts` reads."""
    path.write_text("".join(map(_line, prompts)), encoding="utf-8")


def append_prompt(path: Path, prompt: Prompt) -> None:
    """Add one line to such a file, or start it."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(_line(prompt))


def _line(prompt: Prompt) -> str:
    return json.dumps(asdict(prompt), ensure_ascii=False) + "\n"


def _packaged() -> Iterator[Prompt]:
    folder = resources.files("dspark.data") / "prompts"
    files = [folder / f"{name}.jsonl" for name in DOMAINS]
    sets = [
        _parse(name, f.name, f.read_text("utf-8")) for name, f in zip(DOMAINS, files, strict=True)
    ]
    return chain.from_iterable(zip(*sets, strict=True))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: cannot read this prompt file: {error}.") from error


def _parse(stem: str, name: str, text: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptError(f"{name}, line {number}: not JSON ({error.msg}).") from error
        yield _prompt(row, stem, number, f"{name}, line {number}")


def _prompt(row: object, domain: str, number: int, where: str) -> Prompt:
    if not isinstance(row, dict):
        raise PromptError(f"{where}: expected an object with a 'prompt', not {row!r:.40}.")
    fields = {"id": row.get("id", f"{domain}-{number}"), "domain": row.get("domain", domain)}
    fields["prompt"] = row.get("prompt")
    for key, value in fields.items():
        if not isinstance(value, str) or not value.strip():
            raise PromptError(f"{where}: '{key}' must be a string that is not blank.")
    return Prompt(**fields)


def _from_hub(name: str) -> Iterator[Prompt]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise PromptError(
            f"{name}: a prompt source that does not end in .jsonl is a Hugging Face data set, "
            "which needs the 'datasets' package: pip install 'dspark-serve[datasets]'."
        ) from error
    try:
        rows = load_dataset(name, split="train", streaming=True)
    except Exception as error:  # the package raises many unrelated types
        raise PromptError(f"{name}: cannot load this data set: {error}.") from error
    stem = name.rsplit("/", 1)[-1]
    for number, row in enumerate(rows, 1):
        if "prompt" not in row:
            raise PromptError(f"{name}: no column 'prompt'; it has {', '.join(sorted(row))}.")
        yield _prompt(row, stem, number, f"{name}, row {number}")
