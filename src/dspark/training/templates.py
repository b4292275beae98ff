"""Prompts from sentences with slots, read from `tasks/*.toml`."""

import random
import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any


def from_template(name: str, rng: random.Random) -> str:
    """One prompt of the task file `name`; two uses of one slot get different values."""
    tables = _load(name)
    shuffled: dict[str, list[str]] = {}

    def fill(match: re.Match[str]) -> str:
        options = tables["slots"][match[1]]
        return shuffled.setdefault(match[1], rng.sample(options, len(options))).pop()

    return re.sub(r"\{(\w+)\}", fill, rng.choice(tables["templates"]))


@cache
def _load(name: str) -> dict[str, Any]:
    file = resources.files("dspark.training") / "tasks" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))
