"""A training run on disk: its settings, and checkpoints that are there whole or not at all.

``fit.json`` holds the settings, ``drafter.json`` the drafter's config. ``state.safetensors`` holds
the fp32 weights (``model.*``), AdamW's two moments (``exp_avg.*``, ``exp_avg_sq.*``) and, as JSON
metadata, how far the run has come. There is no random state to keep: anchors and data order are
drawn from (seed, step) and (seed, epoch).
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.core.errors import ConfigError
from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.interface import Drafter
from dspark.training.dataset import DataPosition
from dspark.training.starts import blank_model

DRAFTER = "drafter.json"
STATE = "state.safetensors"

_MODEL = "model."
_VOCABULARY = "model.draft_vocab.ids"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class RunProgress:
    step: int = 0  # updates done
    seconds: float = 0.0  # spent training, over all sittings
    positions: int = 0  # labels trained on
    data: DataPosition = field(default_factory=DataPosition)

    def after(self, positions: int, seconds: float, data: DataPosition) -> Self:
        """One update later."""
        return type(self)(self.step + 1, self.seconds + seconds, self.positions + positions, data)


class Checkpoint:
    """A saved state; raises ConfigError if there is none or it cannot be read."""

    def __init__(self, run: Path) -> None:
        self._run = run
        try:
            with safe_open(run / STATE, framework="pt") as file:
                raw = json.loads(file.metadata()["progress"])
                self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"the checkpoint {run / STATE} cannot be read: {error}") from error
        self.progress = RunProgress(**{**raw, "data": DataPosition(**raw["data"])})

    def model(self, target_folder: Path) -> Drafter:
        config = DrafterConfig.from_json(self._run / DRAFTER)
        model = blank_model(config, target_folder, self._tensors.get(_VOCABULARY))
        model.load_state_dict(
            {
                name.removeprefix(_MODEL): tensor
                for name, tensor in self._tensors.items()
                if name.startswith(_MODEL)
            }
        )
        return model

    def restore_moments(self, model: Drafter, optimizer: torch.optim.Optimizer) -> None:
        """Put AdamW back to where it was, in place; nothing to do before the first update."""
        for name, parameter in model.named_parameters():
            if f"{_MOMENTS[0]}.{name}" in self._tensors:
                moments = {
                    key: self._tensors[f"{key}.{name}"].to(parameter.device, copy=True)
                    for key in _MOMENTS
                }
                step = torch.tensor(float(self.progress.step), device=parameter.device)
                optimizer.state[parameter] = {"step": step, **moments}


def save(
    run: Path, model: Drafter, optimizer: torch.optim.Optimizer, progress: RunProgress
) -> None:
    """Write a checkpoint over the last one."""
    tensors: dict[str, Tensor] = {_MODEL + k: v for k, v in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{key}.{name}": state[key] for key in _MOMENTS if key in state}
    scratch = run / f"{STATE}.partial"
    save_file(tensors, scratch, metadata={"progress": json.dumps(asdict(progress))})
    os.replace(scratch, run / STATE)
