"""Named workloads, cards and models, and files of the same form."""

import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from dspark.core.cost import ProfileKey, StepCost
from dspark.core.errors import ConfigError
from dspark.sim.roofline import Card, Model, step_cost
from dspark.sim.workload import Workload

_FOLDER = resources.files(__name__)
_T = TypeVar("_T", Card, Model)


def load_workload(name: str) -> Workload:
    """A preset, or a .toml file of the presets' form. Raises ConfigError if it is neither."""
    if name.endswith(".toml"):
        return Workload.from_toml(name, _read(name))
    presets = {file.name.removesuffix(".toml"): file for file in (_FOLDER / "workloads").iterdir()}
    if name not in presets:
        raise ConfigError(f"There is no workload {name!r}: give a .toml file or {_any(presets)}.")
    return Workload.from_toml(name, presets[name].read_text("utf-8"))


def load_cost(name: str, draft_length: int) -> StepCost:
    """What steps cost for a planner that drafts `draft_length` tokens a request.

    `name` is CARD:MODEL, both presets; a .toml file with a [card] and a [model] table; or a .json
    file, a measured profile as the scheduler keeps it, whose drafts cost what whole blocks cost
    there. Raises ConfigError if it is none of these.
    """
    if name.endswith(".json"):
        return _measured(name)
    if name.endswith(".toml"):
        described = _parse(_read(name), name)
        cards, models, card, model = described, described, "card", "model"
    else:
        card, _, model = name.partition(":")
        cards, models = (
            _parse((_FOLDER / file).read_text("utf-8"), file)
            for file in ("cards.toml", "models.toml")
        )
        if card not in cards or model not in models:
            raise ConfigError(
                f"There is no cost {name!r}: give a measured .json, a .toml file, or CARD:MODEL "
                f"with {_any(cards)} and {_any(models)}."
            )
    return step_cost(
        _build(Card, cards.get(card), name), _build(Model, models.get(model), name), draft_length
    )


def _measured(path: str) -> StepCost:
    text = _read(path)
    try:
        key = ProfileKey(**json.loads(text)["key"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a measured cost profile: {error!r}.") from error
    return StepCost.from_json(text, key)


def _build(kind: type[_T], table: dict[str, Any] | None, name: str) -> _T:
    """A card or a model from its table."""
    values: dict[str, Any] = {
        field: tuple(value) if isinstance(value, list) else value
        for field, value in (table or {}).items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{name}: its [{kind.__name__.lower()}] does not fit: {error}.") from None


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}.") from error


def _any(names: dict[str, Any]) -> str:
    return "one of " + ", ".join(sorted(names))
