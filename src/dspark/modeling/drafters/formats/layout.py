"""What the reading of a checkpoint of any format gives: its config and tensors, in our words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.config import DrafterConfig, transformer_shape

DRAFT_IDS = "draft_vocab.ids"
OWN_HEAD = "head"

FROZEN_COPIES = frozenset({"embed_tokens.weight", "lm_head.weight"})

_FULL_ATTENTION, _SLIDING_ATTENTION = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A checkpoint folder as some project writes it."""

    format: str  # its name, for people
    path: Path  # of its config.json
    fields: Mapping[str, Any]  # of DrafterConfig; num_target_layers only if the file gives it
    renamed: Mapping[str, str] = field(default_factory=dict)  # our beginning of a name -> theirs
    vocabulary_offsets: bool = False  # the draft vocabulary is d2t: target id - draft id
    unused: frozenset[str] = FROZEN_COPIES  # tensors that say nothing new

    def config(self, target_layers: int) -> DrafterConfig:
        """``target_layers``: the target's own number, meant where the file gives none.

        Raises:
            DrafterError: a field is missing, or they contradict each other.
        """
        given = {"num_target_layers": target_layers, **self.fields}
        return DrafterConfig.from_fields(given, self.path)

    def stored(self, name: str) -> str:
        """What the file calls one of our tensors."""
        for ours, theirs in self.renamed.items():
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name


class Raw:
    """The fields of a JSON object, read so that all that is wrong with them is one clear line."""

    def __init__(self, fields: Mapping[str, Any], path: Path, section: str = "") -> None:
        """``section``: where ``fields`` lie in the file ``path``, for messages."""
        self.fields, self.path = fields, path
        self._prefix = f"{section}." if section else ""

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or the default if it is absent or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise self.missing(name)
        return value

    def count(self, name: str) -> int:
        """A field that must be a number of things."""
        value = self.need(name)
        if type(value) is not int or value < 1:
            raise self.refusal(name)
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise self.refusal(name)
        return float(value)

    def items(self, name: str) -> list[Any] | None:
        """A list, or None if there is none."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise self.refusal(name)
        return value

    def ids(self, name: str, subtract: int = 0) -> tuple[int, ...]:
        """A list of integers, each less ``subtract``."""
        values = self.need(name)
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.refusal(name)
        return tuple(value - subtract for value in values)

    def section(self, name: str) -> "Raw":
        """An object inside, empty if there is none."""
        fields = self.get(name, {})
        if not isinstance(fields, Mapping):
            raise self.refusal(name)
        return Raw(fields, self.path, f"{self._prefix}{name}")

    def only(self, name: str, *supported: Any) -> None:
        """Refuse any value but these; absent and null are as good as the first."""
        if self.get(name, supported[0]) not in supported:
            raise self.refusal(name)

    def missing(self, name: str) -> DrafterError:
        return DrafterError(f"{self.path} lacks the field '{self._prefix}{name}'")

    def refusal(self, name: str) -> DrafterError:
        shown = f"{self._prefix}{name} {self.fields.get(name)!r}"
        return DrafterError(f"{self.path}: {shown} is not supported")


def full_attention_shape(raw: Raw) -> dict[str, Any]:
    """`layer_shape` of layers that see everything.

    Raises:
        DrafterError: they do not, or a field asks for other layers.
    """
    layer_types = raw.items("layer_types")
    if layer_types is None:
        raw.only("use_sliding_window", False)
    elif set(layer_types) - {_FULL_ATTENTION}:
        raise raw.refusal("layer_types")
    return layer_shape(raw)


def layer_windows(raw: Raw) -> tuple[int, ...]:
    """How far each draft layer sees, 0 for all it can; empty where all do.

    Raises:
        DrafterError: the fields contradict each other, or name another kind of layer.
    """
    layer_types = raw.items("layer_types")
    if layer_types is None:
        raw.only("use_sliding_window", False)
        return ()
    if set(layer_types) - {_FULL_ATTENTION, _SLIDING_ATTENTION}:
        raise raw.refusal("layer_types")
    if _SLIDING_ATTENTION not in layer_types:
        return ()
    raw.only("use_sliding_window", True)
    window = raw.count("sliding_window")
    return tuple(window if kind == _SLIDING_ATTENTION else 0 for kind in layer_types)


def layer_shape(raw: Raw) -> dict[str, Any]:
    """`transformer_shape` of layers that are computed here.

    Raises:
        DrafterError: a field asks for others.
    """
    raw.only("quantization_config", None)
    raw.only("partial_rotary_factor", 1, 1.0)
    rope = raw.section("rope_parameters")
    rope.only("partial_rotary_factor", 1, 1.0)
    if any(isinstance(value, Mapping) for value in rope.fields.values()):
        raise raw.refusal("rope_parameters")  # one rotation for each kind of layer
    return transformer_shape(raw.fields, raw.path)


def block(rows: int, anchor_predicts: bool) -> dict[str, Any]:
    """The fields of blocks of so many rows, the anchor's among them."""
    return {"block_size": rows - (not anchor_predicts), "anchor_predicts": anchor_predicts}


def draft_vocabulary(offsets: Tensor, chosen: Tensor | None, path: Path) -> Tensor:
    """Target ids [U] of the draft tokens. offsets: [U], target id - draft id; chosen: [V], which
    target tokens are among them, where the file says so too.

    Raises:
        DrafterError: the two differ.
    """
    ids = torch.arange(len(offsets)) + offsets.long()
    if chosen is not None and not torch.equal(chosen.nonzero()[:, 0], ids):
        raise DrafterError(f"{path}: t2d and d2t name different draft vocabularies")
    return ids
