"""Drafters and sequences that are drawn alike here and where a reference was recorded.

Draws are uniform doubles of numpy's default generator, the same on every machine, then rounded to
fp32. `tests/golden/test_conformance.py` says what they are for.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.families import new_drafter, tensor_shapes
from dspark.modeling.drafters.interface import Drafter

FOLDER = Path(__file__).parent.parent / "golden" / "conformance"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
SPARE = 40
"""Positions drawn after a prompt, more than any run commits."""


@dataclass(frozen=True)
class Run:
    """One sequence in the reference's own decoding loop, against a target that keeps so many drafts
    of each round and then goes on with its own token."""

    prompt: int
    accepted: tuple[int, ...]
    temperature: float

    @property
    def starts(self) -> list[int]:
        """The anchor's position in each round."""
        ends = np.cumsum([kept + 1 for kept in self.accepted[:-1]], dtype=int)
        return [self.prompt, *(self.prompt + ends).tolist()]


@dataclass(frozen=True)
class Case:
    name: str
    config: DrafterConfig
    seed: int
    runs: tuple[Run, ...]

    def weights(self) -> dict[str, Tensor]:
        """All tensors of the drafter, the target's two among them, in the order of their names."""
        frozen = (self.config.vocab_size, self.config.hidden_size)
        shapes = {**tensor_shapes(self.config), EMBEDDING: frozen, HEAD: frozen}
        names = sorted(shapes.keys() - {"draft_vocab.ids"})
        rng = np.random.default_rng(self.seed)
        return {name: _scaled(name, rng.uniform(-1, 1, shapes[name])) for name in names}

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Of a run: what the target taps [L, n * d], and its own tokens [L]."""
        config = self.config
        length = self.runs[index].prompt + SPARE
        rng = np.random.default_rng((self.seed, index))
        width = len(config.target_layer_ids) * config.hidden_size
        taps = 2 * rng.uniform(-1, 1, (length, width))
        tokens = np.floor(rng.uniform(0, config.vocab_size, length))
        return torch.from_numpy(taps).float(), torch.from_numpy(tokens).long()

    @property
    def draft_ids(self) -> Tensor | None:
        """What can be drafted: spread over the vocabulary."""
        size = self.config.draft_vocab_size
        return torch.arange(size) * self.config.vocab_size // size if size else None

    def drafter(self) -> Drafter:
        weights = self.weights()
        embedding, head = weights.pop(EMBEDDING), weights.pop(HEAD)
        model = new_drafter(self.config, embedding, head, self.draft_ids)
        model.load_state_dict({**model.state_dict(), **weights})
        return model.eval()


def load_cases() -> dict[str, Case]:
    table = json.loads((FOLDER / "cases.json").read_text())
    return {name: _case(name, table["shape"], raw) for name, raw in table["cases"].items()}


def _case(name: str, shape: Mapping[str, Any], raw: Mapping[str, Any]) -> Case:
    fields = {**shape, **raw["config"]}
    tuples = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    config = DrafterConfig(**{**fields, **tuples})
    runs = (Run(r["prompt"], tuple(r["accepted"]), r["temperature"]) for r in raw["runs"])
    return Case(name, config, raw["seed"], tuple(runs))


def _scaled(name: str, values: np.ndarray) -> Tensor:
    """Large enough that every tensor shows in the output."""
    if name.endswith("norm.weight"):
        values = 1 + values / 2
    elif "codebook" in name or name in (EMBEDDING, "markov_head.markov_w1.weight"):
        values = 1.5 * values
    else:  # a kernel's change is small beside the kernel, as where training starts
        values = values / (8 if "kernel_projection" in name else 3)
    return torch.from_numpy(values).float()
