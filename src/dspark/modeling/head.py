"""The local LM head: hidden rows to fp32 logits, without the rest of the target."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.core.errors import TargetError
from dspark.modeling.linear import Fp16WeightLinear, Precision, packs_bf16
from dspark.modeling.sampling import argmax
from dspark.modeling.screen import ArgmaxScreen

_HEAD = "lm_head.weight"
_TIED = "model.embed_tokens.weight"
_SCREENED_ROWS = 6  # from so many on a screened argmax is faster than all the logits


class LocalHead:
    """``logits = soft_cap(scale * hidden @ W.T)``, accumulated and returned in fp32.

    On a CPU, precisions other than fp32 keep W in fp16: half the memory to stream a step, and an
    error far below that of bf16.
    """

    def __init__(
        self,
        weight: Tensor,
        precision: Precision,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        """weight: [V, d]."""
        self.vocab_size, self.hidden_size = weight.shape
        self._scale = scale
        self._soft_cap = soft_cap
        self._digest: str | None = None
        self.weight = weight
        self._linear: Callable[[Tensor], Tensor] = (
            partial(torch.nn.functional.linear, weight=weight)
            if precision == "fp32" or weight.device.type != "cpu"
            else Fp16WeightLinear(weight)
        )
        self._screen = ArgmaxScreen(weight) if packs_bf16(precision, weight.device) else None

    @classmethod
    def from_folder(
        cls, folder: Path, precision: Precision, device: torch.device | None = None
    ) -> Self:
        """Read only the head of a checkpoint (the embedding where the two are tied)."""
        config = json.loads((folder / "config.json").read_text())
        return cls(
            _read_weight(folder, bool(config.get("tie_word_embeddings"))).to(device),
            precision,
            scale=float(config.get("logit_scale") or 1.0),
            soft_cap=config.get("final_logit_softcapping"),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [N, d], any float dtype. Returns [N, V] fp32."""
        with torch.inference_mode():
            return shaped(self._linear(hidden.float()), self._scale, self._soft_cap)

    def argmax(self, hidden: Tensor) -> NDArray[np.int64]:
        """Token of the largest of ``logits(hidden)``, of equal ones the lowest, [N]."""
        if self._screen is None or len(hidden) < _SCREENED_ROWS:
            return argmax(self.logits(hidden))
        with torch.inference_mode():
            return self._screen.argmax(hidden)

    @property
    def digest(self) -> str:
        """SHA-256 over the fp32 weight, the scale and the soft-cap."""
        if self._digest is None:
            digest = hashlib.sha256(self.weight.contiguous().cpu().numpy().tobytes())
            digest.update(repr((self._scale, self._soft_cap)).encode())
            self._digest = digest.hexdigest()
        return self._digest


def shaped(logits: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    """soft_cap(scale * logits), the very tensor where there is neither."""
    if scale != 1.0:
        logits = logits * scale
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return logits


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Hidden rows [N, d] before the head: each is taken through it as far as its reader needs."""

    head: LocalHead
    hidden: Tensor

    def argmax(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Of the logits of these rows."""
        return self.head.argmax(self._select(rows))

    def logits(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), V] fp32."""
        return self.head.logits(self._select(rows))

    def _select(self, rows: Sequence[int]) -> Tensor:
        if list(rows) == list(range(len(self.hidden))):
            return self.hidden
        return self.hidden.index_select(0, torch.tensor(rows, device=self.hidden.device))


def _read_weight(folder: Path, tied: bool) -> Tensor:
    names = (_TIED, _HEAD) if tied else (_HEAD,)
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                held = set(tensors.keys())
                for name in names:
                    if name in held:
                        weight: Tensor = tensors.get_tensor(name)
                        return weight.float()
    except (OSError, SafetensorError) as error:
        raise TargetError(f"the weights in {folder} cannot be read: {error}") from error
    raise TargetError(f"no tensor {' or '.join(names)} in the checkpoint {folder}")
