"""`dspark evaluate threshold`: what fixed cuts of the survival verify, and what of it is kept.

A diagnostic: it shows what every threshold trades, and that the trade is another one in each
domain. Which is worth its time depends on the load of the moment, and no fixed cut can know that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspark.core.calibration import apply
from dspark.core.types import Ints, Scaling, VerificationMode
from dspark.data import Prompt
from dspark.evaluation.answers import answers
from dspark.modeling.drafters.checkpoint import load_calibration
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.targets import Progress, silent
from dspark.training import anchors
from dspark.training.held_out import draft_greedily, greedy_accepted, walk
from dspark.training.shards import CachedSequence

THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rounds that verify only tokens whose survival is at least `threshold`. Lengths count the
    target's own token."""

    threshold: float
    rounds: int
    verified: float
    accepted: float
    kept_share: float  # of the verified draft tokens


def measure(
    target: str,
    drafter: Path,
    prompts: Sequence[Prompt],
    responses: Path,
    thresholds: Sequence[float],
    *,
    max_tokens: int = 128,
    progress: Progress = silent,
) -> dict[str, list[Cut]]:
    """By domain, along the target's greedy answers; `responses` is where these are kept.

    Raises:
        TargetError, DrafterError: a model cannot be loaded.
        PromptError: the folder of answers cannot be read.
    """
    model, greedy = answers(
        target,
        drafter,
        prompts,
        responses,
        temperatures=(0.0,),
        max_tokens=max_tokens,
        progress=progress,
    )
    scaling = load_calibration(drafter, model.config).get(VerificationMode.GREEDY.value)
    rounds: dict[str, dict[float, list[Ints]]] = {}
    for sequence in greedy:
        for threshold, met in _rounds(model, scaling, sequence, thresholds).items():
            own = rounds.setdefault(sequence.info.domain, {})
            own.setdefault(threshold, []).append(met)
    return {
        domain: [_cut(threshold, np.concatenate(parts, axis=1)) for threshold, parts in own.items()]
        for domain, own in rounds.items()
    }


def _rounds(
    model: Drafter,
    scaling: Scaling | None,
    sequence: CachedSequence,
    thresholds: Sequence[float],
) -> dict[float, Ints]:
    """Draft tokens admitted and accepted in each round that decoding meets, [2, rounds]."""
    positions = anchors.candidates(sequence.loss_mask.numpy().astype(bool))
    if len(positions) == 0:
        return {}
    blocks = draft_greedily(model, sequence, positions)
    kept, judged = greedy_accepted(sequence, positions, blocks.tokens)
    confidences = apply(
        blocks.confidence_logits, scaling or Scaling.none(blocks.confidence_logits.shape[1])
    )
    survival = np.cumprod(confidences, axis=1)
    found = {}
    for threshold in thresholds:
        admitted = np.minimum((survival >= threshold).sum(axis=1), judged)
        accepted = np.minimum(kept, admitted)
        met = walk(accepted)
        found[threshold] = np.stack([admitted[met], accepted[met]])
    return found


def _cut(threshold: float, rounds: Ints) -> Cut:
    admitted, accepted = rounds.sum(axis=1).tolist()
    count = rounds.shape[1]
    return Cut(
        threshold,
        count,
        verified=1 + admitted / count,
        accepted=1 + accepted / count,
        kept_share=accepted / max(admitted, 1),
    )
