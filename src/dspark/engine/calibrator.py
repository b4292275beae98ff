"""The confidences of one drafter: calibrated for planners, and learning from verdicts.

What it says in a step depends on the drafts of that step and on steps that are committed, never on
verdicts to come; so however it learns, a plan that may use confidences may use calibrated ones.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark.core.calibration import Array
from dspark.core.errors import ConfigError, DrafterError
from dspark.core.online_calibration import OnlineCalibration
from dspark.core.reliability import PositionScores, by_position
from dspark.core.types import Draft, DrafterInfo, DraftSource, Ints, Scaling, VerificationMode

_RECENT_BLOCKS = 2048

Modes = Sequence[VerificationMode]


class Stream(NamedTuple):
    """Drafts whose confidences are calibrated together."""

    mode: VerificationMode
    source: DraftSource


@dataclass(frozen=True, slots=True)
class CalibrationStatus:
    """How well the confidences of one stream predict. The scores are of the survivals that planners
    were given, over the last 2,048 verified blocks."""

    online: bool  # whether the fit from verdicts is in use, or else the drafter's own scaling
    positions: tuple[PositionScores, ...]


class Calibrator:
    """Turns confidence logits into calibrated confidences, by verification mode.

    Raises DrafterError for a drafter whose calibration does not cover its block; in a mode that it
    has none for, confidences start as they are.
    """

    def __init__(self, info: DrafterInfo) -> None:
        self.block_size = info.block_size
        self._online: dict[VerificationMode, OnlineCalibration] = {}
        self._recent: dict[VerificationMode, _RecentBlocks] = {}
        for mode in VerificationMode:
            own = info.calibration.get(mode, Scaling.none(info.block_size))
            if not own.fits(info.block_size):
                raise DrafterError(
                    f"Drafter {info.name} needs {info.block_size} positive temperatures and as "
                    f"many intercepts for {mode}, got {own}: calibrate it again."
                )
            self._online[mode] = OnlineCalibration(own)
            self._recent[mode] = _RecentBlocks(info.block_size)

    def confidences(self, drafts: Sequence[Draft | None], modes: Modes) -> Array:
        """Probability of each drafted token to be kept, given that those before it were; 0 where
        there is none, [R, block size]."""
        logits = self._logits(drafts)
        confidences = np.zeros_like(logits)
        for mode, online in self._online.items():
            rows = _rows(modes, mode)
            if rows.any():
                confidences[rows] = online.confidences(logits[rows])
        return confidences

    def record(
        self,
        drafts: Sequence[Draft | None],
        modes: Modes,
        survival: Array,
        accepted: Ints,
        admitted: Ints,
    ) -> None:
        """Learn how N drafts turned out: survival as planned with [N, block size], tokens accepted
        [N] and admitted [N]."""
        logits = self._logits(drafts)
        for mode, online in self._online.items():
            rows = _rows(modes, mode) & (admitted > 0)
            if rows.any():
                online.record(logits[rows], accepted[rows], admitted[rows])
                self._recent[mode].add(survival[rows], accepted[rows], admitted[rows])

    def status(self) -> dict[VerificationMode, CalibrationStatus]:
        """By mode, of those that were verified at all. Takes milliseconds."""
        return {
            mode: CalibrationStatus(online.in_use, self._recent[mode].scores())
            for mode, online in self._online.items()
            if len(self._recent[mode])
        }

    @property
    def has_learnt(self) -> bool:
        """Whether there is anything to keep."""
        return any(online.has_learnt for online in self._online.values())

    def to_json(self) -> str:
        """What was learnt; `restore` takes it back."""
        return json.dumps({mode.value: online.state() for mode, online in self._online.items()})

    def restore(self, text: str) -> None:
        """Go on from what was learnt about the same drafter. Raises ConfigError if it is not that,
        and is then good for nothing."""
        try:
            states = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"A calibration state is not JSON: {error}.") from error
        if not isinstance(states, Mapping) or set(states) != set(VerificationMode):
            raise ConfigError("A calibration state does not cover the verification modes.")
        for mode, online in self._online.items():
            online.restore(states[mode])

    def _logits(self, drafts: Sequence[Draft | None]) -> Array:
        """[R, block size], -inf where there is no token."""
        rows = [np.zeros(0) if draft is None else draft.confidence_logits for draft in drafts]
        lengths = np.array([len(row) for row in rows], np.int64)
        logits = np.full((len(rows), self.block_size), -np.inf)
        if rows:
            logits[np.arange(self.block_size) < lengths[:, None]] = np.concatenate(rows)
        return logits


class _RecentBlocks:
    """The last verified blocks of a mode."""

    def __init__(self, block_size: int) -> None:
        self._survival = np.zeros((_RECENT_BLOCKS, block_size), np.float32)
        self._accepted = np.zeros(_RECENT_BLOCKS, np.int64)
        self._admitted = np.zeros(_RECENT_BLOCKS, np.int64)
        self._count = 0  # blocks ever added; the next one replaces the oldest

    def __len__(self) -> int:
        return min(self._count, _RECENT_BLOCKS)

    def add(self, survival: Array, accepted: Ints, admitted: Ints) -> None:
        places = np.arange(self._count, self._count + len(survival)) % _RECENT_BLOCKS
        self._survival[places] = survival
        self._accepted[places] = accepted
        self._admitted[places] = admitted
        self._count += len(survival)

    def scores(self) -> tuple[PositionScores, ...]:
        kept = slice(len(self))
        return by_position(self._survival[kept], self._accepted[kept], self._admitted[kept])


def _rows(modes: Modes, mode: VerificationMode) -> NDArray[np.bool_]:
    return np.array([own is mode for own in modes], np.bool_)
