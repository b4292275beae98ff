"""Everything a training run can be told."""

import argparse
import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, get_args, get_type_hints

from dspark.core.errors import ConfigError
from dspark.modeling.drafters.config import METHODS
from dspark.modeling.losses import LossWeights
from dspark.modeling.targets import DEFAULT_TARGET
from dspark.training.schedule import Schedule

CONFIG = "fit.json"

_POSITIVE = (
    "num_hidden_layers",
    "block_size",
    "short_block",
    "learning_rate",
    "clip",
    "positions_per_step",
    "num_anchors",
    "checkpoint_every",
    "log_every",
    "threads",
)
_DRAFTER = (
    "method",
    "num_hidden_layers",
    "block_size",
    "anchor_predicts",
    "markov_rank",
    "markov_head_type",
    "mask_token_id",
    "inject_previous_feature",
)
_CHAIN = {
    "num_hidden_layers": 1,
    "markov_rank": 0,
    "inject_previous_feature": False,
    "ce_weight": 0.0,
    "soft_ce_weight": 1.0,
    "l1_weight": 0.0,
    "confidence_weight": 0.0,
    "loss_decay": 4.48,  # weights of 0.8^(k-1)
    "short_share": 0.0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dflash": {"markov_rank": 0, "ce_weight": 1.0, "l1_weight": 0.0, "confidence_weight": 0.0},
    "dflash2": {
        "anchor_predicts": False,
        "ce_weight": 1.0,
        "l1_weight": 0.0,
        "confidence_weight": 0.0,
        "selector_weight": 1.0,
    },
    "eagle3": _CHAIN,
    "mtp1": _CHAIN | {"block_size": 1, "short_block": 1},
}
"""What a method's own recipe sets otherwise than the defaults below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Validated on construction; raises ConfigError naming the field."""

    data: str  # folder of response shards
    target: str = DEFAULT_TARGET  # name, folder or hub id
    minutes: float | None = None  # length of the run by the clock, over all sittings, or
    steps: int | None = None  # by the number of updates; exactly one of the two
    seed: int = 0
    # drafter
    method: str = "dspark"
    start_from: str | None = None  # a drafter to go on from, of the shape below; None: a new one
    num_hidden_layers: int = 2
    block_size: int = 4
    target_layer_ids: tuple[int, ...] = (1, 14, 27)  # as the shards were made
    anchor_predicts: bool = True
    markov_rank: int = 128
    markov_head_type: str = "vanilla"  # or "gated", "rnn"
    draft_vocab_size: int = 8192  # 0: the whole vocabulary
    mask_token_id: int = 0
    inject_previous_feature: bool = True
    aligned_start: bool = True
    bigram_start: bool = True
    # optimisation
    learning_rate: float = 3e-3
    warmup: float = 0.04  # share of the run
    clip: float = 1.0
    short_block: int = 2  # block size of the first short_share of the run
    short_share: float = 0.5
    positions_per_step: int = 448
    num_anchors: int = 48  # most blocks of one sequence in a step
    ce_weight: float = 0.1
    soft_ce_weight: float = 0.0
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    selector_weight: float = 0.0
    loss_decay: float | None = 4.0  # None: the block size, as the paper's formula has it
    # run
    device: str = "cpu"  # or "cuda": each process of torchrun takes one of its own
    threads: int = 2
    checkpoint_every: int = 250  # steps
    log_every: int = 10  # steps

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ConfigError("a training run needs a length: either minutes or steps")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        if not (self.minutes or self.steps or 0) > 0:
            raise ConfigError("the length of a training run must be positive")
        if self.short_block > self.block_size:
            raise ConfigError(
                f"short_block {self.short_block} exceeds block_size {self.block_size}"
            )
        for name in ("warmup", "short_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is a share of the run and must lie in [0, 1)")
        if self.loss_decay is not None and not self.loss_decay > 0:
            raise ConfigError(f"loss_decay must be positive, not {self.loss_decay}")

    @property
    def loss_weights(self) -> LossWeights:
        return LossWeights(
            ce=self.ce_weight,
            soft_ce=self.soft_ce_weight,
            l1=self.l1_weight,
            confidence=self.confidence_weight,
            selector=self.selector_weight,
        )

    @property
    def schedule(self) -> Schedule:
        return Schedule(
            self.learning_rate, self.warmup, self.block_size, self.short_block, self.short_share
        )

    @property
    def drafter_fields(self) -> dict[str, Any]:
        """What DrafterConfig.for_target takes from here; the vocabulary's size comes from data."""
        return {
            "target_layer_ids": self.target_layer_ids,
            "enable_confidence_head": self.confidence_weight > 0,
            **{name: getattr(self, name) for name in _DRAFTER},
        }

    def progress(self, step: int, seconds: float) -> float:
        """How far the run is, from 0 to 1."""
        if self.steps is not None:
            return step / self.steps
        assert self.minutes is not None
        return seconds / (60 * self.minutes)

    def write(self, run: Path) -> None:
        (run / CONFIG).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, run: Path) -> Self:
        """Raises ConfigError if ``run`` holds no run, or one of a later version. What an earlier
        one did not know has its default."""
        try:
            raw = dict(json.loads((run / CONFIG).read_text()))
            raw["target_layer_ids"] = tuple(raw["target_layer_ids"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{run} is not a training run: {error}") from error
        if unknown := raw.keys() - {field.name for field in fields(cls)}:
            raise ConfigError(
                f"{run / CONFIG} has settings that this version does not know: "
                f"{', '.join(sorted(unknown))}"
            )
        return cls(**raw)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """One option for each field of FitConfig; ``--loss-decay paper`` stands for None. What is not
    given is left out: it comes from the method's preset, or else from the default."""
    hints = get_type_hints(FitConfig)
    for field in fields(FitConfig):
        hint = hints[field.name]
        options: dict[str, Any] = {
            "required": field.default is MISSING,
            "default": argparse.SUPPRESS,
            "help": argparse.SUPPRESS if field.default is MISSING else f"default: {field.default}",
        }
        if hint is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif field.name == "loss_decay":
            options["type"] = lambda text: None if text == "paper" else float(text)
        elif field.name == "method":
            options["choices"] = METHODS
        elif field.name == "target_layer_ids":
            options["type"] = lambda text: tuple(int(part) for part in text.split(","))
        else:
            options["type"] = next(iter(get_args(hint)), hint)
        parser.add_argument(f"--{field.name.replace('_', '-')}", **options)
