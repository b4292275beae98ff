"""The local LM head: hidden rows to fp32 logits, without the rest of the target."""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.core.errors import TargetError
from dspark.modeling.linear import Fp16WeightLinear, Precision

_HEAD = "lm_head.weight"
_TIED = "model.embed_tokens.weight"


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
            if precision == "fp32"
            else Fp16WeightLinear(weight)
        )

    @classmethod
    def from_folder(cls, folder: Path, precision: Precision) -> Self:
        """Read only the head of a checkpoint (the embedding where the two are tied)."""
        config = json.loads((folder / "config.json").read_text())
        return cls(
            _read_weight(folder, bool(config.get("tie_word_embeddings"))),
            precision,
            scale=float(config.get("logit_scale") or 1.0),
            soft_cap=config.get("final_logit_softcapping"),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [N, d], any float dtype. Returns [N, V] fp32."""
        with torch.inference_mode():
            logits = self._linear(hidden.float())
            if self._scale != 1.0:
                logits = logits * self._scale
            if self._soft_cap is not None:
                logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
            return logits

    @property
    def digest(self) -> str:
        """SHA-256 over the fp32 weight, the scale and the soft-cap."""
        if self._digest is None:
            digest = hashlib.sha256(self.weight.contiguous().numpy().tobytes())
            digest.update(repr((self._scale, self._soft_cap)).encode())
            self._digest = digest.hexdigest()
        return self._digest


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
