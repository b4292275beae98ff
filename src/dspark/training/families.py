"""Families of small Python tasks, read from `tasks/*.toml`, each with a reference solution.

A family is a table of templates with `$placeholders`:

    names      function names, one picked at random
    asks       the task in words ("return the ..."), one picked at random
    signature  "(values: list[int]) -> list[int]"
    body       the reference solution, from which the results of examples are computed; `$name`
               is the function itself
    inputs     a maker of `makers.py` for each parameter, as a Python expression
    slots      each one a list of choices or the name of such a list in the file's [slots]
               table; a choice gives values for some placeholders

The files belong to this package; never feed it others, since expressions and bodies are run.
"""

import copy
import random
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from string import Template
from typing import Any

from dspark.training import makers
from dspark.training.makers import Maker

_FILES = ("numbers", "lists", "strings", "structures")
_MAX_EXAMPLE = 150  # characters: longer examples read badly in a docstring
_IMPORTS = {
    r"\bmath\.": "import math",
    r"\bre\.": "import re",
    r"\bCounter\b": "from collections import Counter",
    r"\bdeque\b": "from collections import deque",
    r"\bdate\b": "from datetime import date",
    r"\btimedelta\b": "from datetime import timedelta",
}
# A parameter may appear under other usual names, so that prompts of one family do not all
# read alike. Only parameters are renamed, and only when the new name is free.
_ALIASES = {
    "values": ("numbers", "nums", "values", "arr", "items"),
    "text": ("text", "s", "sentence", "string"),
    "words": ("words", "strings", "names"),
    "matrix": ("matrix", "grid", "rows"),
    "mapping": ("mapping", "data", "d"),
    "target": ("target", "goal", "x"),
    "n": ("n", "number", "num"),
    "k": ("k", "size", "m"),
}


@dataclass(frozen=True)
class Family:
    """One table of a task file, its inputs and slots resolved."""

    names: Sequence[str]
    asks: Sequence[str]
    signature: str
    body: str
    inputs: Sequence[Maker]
    slots: Sequence[Sequence[Mapping[str, str]]]


@dataclass(frozen=True)
class Example:
    """Arguments of the function and what the reference returns for them."""

    arguments: tuple[Any, ...]
    result: Any


@dataclass(frozen=True)
class Problem:
    """A family with its slots filled: what a prompt is written from."""

    name: str
    ask: str
    source: str
    examples: tuple[Example, ...]

    @property
    def signature(self) -> str:
        """The `def` line of the source."""
        return next(line for line in self.source.splitlines() if line.startswith("def "))

    def call(self, example: Example) -> str:
        """The example as a call, `name(1, 'a')`."""
        return f"{self.name}({', '.join(map(repr, example.arguments))})"


@cache
def load_families() -> tuple[Family, ...]:
    """All families, in the order of the files."""
    folder = resources.files("dspark.training") / "tasks"
    families: list[Family] = []
    for name in _FILES:
        tables = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
        families += (_family(row, tables.get("slots", {})) for row in tables["family"])
    return tuple(families)


def realise(family: Family, rng: random.Random) -> Problem:
    """Fill the slots, rename the parameters and compute 2 to 4 examples with the reference."""
    filling: dict[str, str] = {}
    for slot in family.slots:
        filling.update(rng.choice(slot))

    def fill(template: str) -> str:
        return Template(template).substitute(filling)

    name = fill(rng.choice(family.names))
    ask = fill(rng.choice(family.asks))
    filling["name"] = name
    body = textwrap.indent(fill(family.body).strip("\n"), "    ")
    source = f"def {name}{fill(family.signature)}:\n{body}"
    for parameter in re.findall(r"(\w+):", family.signature.split(")")[0]):
        alias = rng.choice(_ALIASES.get(parameter, (parameter,)))
        if not re.search(rf"\b{alias}\b", source):
            source = re.sub(rf"(?<![.\\])\b{parameter}\b", alias, source)
            ask = ask.replace(f"`{parameter}`", f"`{alias}`")
    imports = sorted(line for use, line in _IMPORTS.items() if re.search(use, source))
    if imports:
        source = "\n".join(imports) + "\n\n\n" + source
    function = compile_function(source, name)
    return Problem(name, ask, source, _examples(function, family.inputs, rng))


def compile_function(source: str, name: str) -> Callable[..., Any]:
    """The function `name` of a family's source, made to leave its arguments as they are."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return lambda *arguments: namespace[name](*copy.deepcopy(arguments))


def _family(row: dict[str, Any], tables: dict[str, Any]) -> Family:
    slots = [tables[slot] if isinstance(slot, str) else slot for slot in row.pop("slots", [])]
    inputs = [eval(expression, vars(makers)) for expression in row.pop("inputs")]
    return Family(**row, inputs=inputs, slots=slots)


def _examples(
    function: Callable[..., Any], inputs: Sequence[Maker], rng: random.Random
) -> tuple[Example, ...]:
    """Short examples, with different results as far as a few draws give any."""
    wanted = rng.randint(2, 4)
    by_result: dict[str, Example] = {}
    by_arguments: dict[str, Example] = {}
    for _ in range(16):
        arguments = tuple(make(rng) for make in inputs)
        example = Example(arguments, function(*arguments))
        if len(repr(arguments)) + len(repr(example.result)) <= _MAX_EXAMPLE:
            by_result.setdefault(repr(example.result), example)
            by_arguments.setdefault(repr(arguments), example)
        if len(by_result) == wanted:
            break
    first = list(by_result.values())
    return tuple([*first, *(e for e in by_arguments.values() if e not in first)][:wanted])
