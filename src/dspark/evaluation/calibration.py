"""`dspark evaluate calibration`: how far a drafter's confidences can be believed.

The target answers prompts, half of them greedily and half at temperature 1; the drafter drafts
along, as `dspark calibrate` does, and the survival it predicts is held against what was accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.core.reliability import PositionScores, Reliability, by_position, reliability
from dspark.core.types import Scaling, VerificationMode
from dspark.data import Prompt
from dspark.evaluation.answers import answers
from dspark.modeling.drafters.checkpoint import load_calibration
from dspark.modeling.targets import Progress, silent
from dspark.training.calibrate import Judged, judge


@dataclass(frozen=True, slots=True)
class Calibration:
    """Survival as the drafter predicts it, with a certain scaling, entry k for position k."""

    scaling: Scaling
    scores: tuple[PositionScores, ...]
    diagrams: tuple[Reliability, ...]

    @classmethod
    def of(cls, judged: Judged, scaling: Scaling) -> "Calibration":
        survival = judged.survival(scaling)
        scores = by_position(survival, judged.accepted, judged.judged)
        diagrams = []
        for k in range(len(scores)):
            seen = judged.judged > k
            diagrams.append(reliability(survival[seen, k], judged.accepted[seen] > k))
        return cls(scaling, scores, tuple(diagrams))


@dataclass(frozen=True, slots=True)
class BeforeAndAfter:
    """As the confidence head says, and with the calibration of the checkpoint."""

    before: Calibration
    after: Calibration


def measure(
    target: str,
    drafter: Path,
    prompts: Sequence[Prompt],
    responses: Path,
    *,
    max_tokens: int = 128,
    progress: Progress = silent,
) -> dict[VerificationMode, BeforeAndAfter]:
    """By mode, where there are answers for it. `responses` is where they are kept, and found again.

    Raises:
        TargetError, DrafterError: a model cannot be loaded.
        PromptError: the folder of answers cannot be read.
    """
    model, made = answers(
        target,
        drafter,
        prompts,
        responses,
        temperatures=(0.0, 1.0),
        max_tokens=max_tokens,
        progress=progress,
    )
    fitted = load_calibration(drafter, model.config)
    plain = Scaling.none(model.config.block_size)
    result = {}
    for mode, parts in judge(model, made).items():
        if parts:
            judged = Judged.joined(parts)
            before, after = (
                Calibration.of(judged, scaling)
                for scaling in (plain, fitted.get(mode.value) or plain)
            )
            result[mode] = BeforeAndAfter(before, after)
    return result
