"""Fit the confidences: ``python -m dspark.training.calibrate --drafter FOLDER --data SHARDS``.

Sequential temperature scaling with intercepts, a table for each verification mode, on held-out
responses:

- ``greedy``: greedy responses; a drafted token is accepted if it equals the response's, exactly as
  in serving, and its confidence follows the drafter's own tokens.
- ``rejection`` (temperature 1): sampled responses; along the response the expected acceptance
  ``sum(min(p, q))`` of each position is known, and whether it was accepted is *drawn* from it.

Rounds are those that decoding would meet. What is written is fitted on all of them; to score the
method, the responses are dealt out in two halves, and each is scored with what the other one gave.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from dspark.core.calibration import apply, fit_sts
from dspark.core.errors import DSparkError
from dspark.core.reliability import by_position
from dspark.core.types import Scaling, VerificationMode
from dspark.modeling.drafters.checkpoint import CALIBRATION, load_drafter
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.losses import LossWeights
from dspark.modeling.targets import DEFAULT_TARGET, resolve_target
from dspark.training import anchors
from dspark.training.dataset import Blocks
from dspark.training.environment import reexec_with_settings
from dspark.training.held_out import BLOCKS_AT_ONCE, draft_greedily, greedy_accepted, walk
from dspark.training.loop import TeacherForcing
from dspark.training.shards import CachedSequence, ResponseCache, Split

Ints = NDArray[np.int64]

MIN_REACHED = 500
"""Blocks that must have been accepted up to a position for its scaling to be fitted."""


@dataclass(frozen=True, slots=True)
class Judged:
    """N verified blocks: what the drafter believed, and what came of it."""

    confidence_logits: NDArray[np.float32]  # [N, block_size]
    accepted: Ints  # [N]
    judged: Ints  # [N] positions with a verdict
    committed: Ints  # [N] tokens: those accepted and, unless the response ended, the bonus

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(
            np.concatenate([part.confidence_logits for part in parts]),
            np.concatenate([part.accepted for part in parts]),
            np.concatenate([part.judged for part in parts]),
            np.concatenate([part.committed for part in parts]),
        )

    def survival(self, scaling: Scaling) -> NDArray[np.float64]:
        """[N, block_size] predicted survival through each position."""
        confidences = apply(self.confidence_logits, scaling)
        return np.cumprod(confidences, axis=1, dtype=np.float64)


def calibrate(model: Drafter, cache: ResponseCache, seed: int = 0) -> dict[str, Any]:
    """Contents of calibration.json: scalings by mode, and how good such a fit is.

    ECE is that of the survival through each position, on responses that the fit did not see; the
    floor is what a perfect model would measure on as many.
    """
    names = ("temperatures", "intercepts", "ece_before", "ece_after", "ece_floor", "blocks")
    result: dict[str, Any] = {name: {} for name in names}
    for mode, parts in judge(model, cache, seed).items():
        if len(parts) < 2:
            continue
        halves = Judged.joined(parts[0::2]), Judged.joined(parts[1::2])
        everything = Judged.joined(halves)
        unscaled = everything.survival(Scaling.none(model.config.block_size))
        crossed = np.concatenate(
            [own.survival(fit(other)) for own, other in (halves, halves[::-1])]
        )
        scaling = fit(everything)
        before, after = (
            by_position(p, everything.accepted, everything.judged) for p in (unscaled, crossed)
        )
        result["temperatures"][mode.value] = scaling.temperatures
        result["intercepts"][mode.value] = scaling.intercepts
        result["ece_before"][mode.value] = [scores.ece for scores in before]
        result["ece_after"][mode.value] = [scores.ece for scores in after]
        result["ece_floor"][mode.value] = [scores.ece_floor for scores in after]
        result["blocks"][mode.value] = len(everything.accepted)
    return result


def judge(
    model: Drafter, cache: Iterable[CachedSequence], seed: int = 0
) -> dict[VerificationMode, list[Judged]]:
    """The blocks of each response, by mode: greedy responses for one, sampled ones for the other.

    ``seed`` draws what is accepted in `rejection` mode.
    """
    forcing = TeacherForcing(model, LossWeights(), loss_decay=1.0)
    rng = np.random.default_rng(seed)
    judged: dict[VerificationMode, list[Judged]] = {mode: [] for mode in VerificationMode}
    for sequence in cache:
        positions = anchors.candidates(sequence.loss_mask.numpy().astype(bool))
        if len(positions) == 0:
            continue
        if sequence.info.temperature == 0:
            judged[VerificationMode.GREEDY].append(_greedy(model, sequence, positions))
        else:
            judged[VerificationMode.REJECTION].append(_rejection(forcing, sequence, positions, rng))
    return judged


def fit(judged: Judged) -> Scaling:
    """Of all positions; none from the first one on that too few blocks reached.

    Where hardly any block gets, survival is near 0 whatever the temperature, and the fit would
    run to the edge of its grid.
    """
    block_size = judged.confidence_logits.shape[1]
    reached = [int((judged.accepted >= k).sum()) for k in range(block_size)]
    depth = next((k for k, count in enumerate(reached) if count < MIN_REACHED), block_size)
    fitted = fit_sts(judged.confidence_logits[:, :depth], judged.accepted, judged.judged)
    rest = Scaling.none(block_size - depth)
    return Scaling(fitted.temperatures + rest.temperatures, fitted.intercepts + rest.intercepts)


def _greedy(model: Drafter, sequence: CachedSequence, positions: Ints) -> Judged:
    blocks = draft_greedily(model, sequence, positions)
    accepted, countable = greedy_accepted(sequence, positions, blocks.tokens)
    return _met(blocks.confidence_logits, accepted, countable)


@torch.inference_mode()
def _rejection(
    forcing: TeacherForcing,
    sequence: CachedSequence,
    positions: Ints,
    rng: np.random.Generator,
) -> Judged:
    block_size = forcing.model.config.block_size
    logits = np.zeros((len(positions), block_size), np.float32)
    acceptance = np.zeros((len(positions), block_size), np.float32)
    counted = anchors.counted_labels(sequence.loss_mask.numpy().astype(bool), positions, block_size)
    for start in range(0, len(positions), BLOCKS_AT_ONCE):
        part = slice(start, start + BLOCKS_AT_ONCE)
        batch = [Blocks.at(sequence, positions[part], block_size)]
        judgement = forcing.judge(batch)
        logits[part][counted[part]] = judgement.confidence_logits.numpy()
        acceptance[part][counted[part]] = judgement.acceptance.numpy()
    kept = rng.random(acceptance.shape) < acceptance
    accepted = np.logical_and.accumulate(kept, axis=1).sum(axis=1)
    return _met(logits, accepted, counted.sum(axis=1))


def _met(logits: NDArray[np.float32], accepted: Ints, judged: Ints) -> Judged:
    """Of the blocks at all anchors of a response, those that decoding would meet."""
    met = walk(accepted)
    committed = np.minimum(accepted[met] + 1, len(accepted) - met)
    return Judged(logits[met], accepted[met], judged[met], committed)


def main() -> int:
    reexec_with_settings()
    parser = argparse.ArgumentParser(prog="calibrate", description="Fit a drafter's confidences.")
    parser.add_argument("--drafter", type=Path, required=True, help="checkpoint folder, written to")
    parser.add_argument("--data", type=Path, required=True, help="folder of response shards")
    parser.add_argument("--target", default=DEFAULT_TARGET)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    try:
        target = resolve_target(arguments.target)
        model = load_drafter(arguments.drafter, target)
        cache = ResponseCache(arguments.data, split=Split.HELD_OUT)
        result = calibrate(model, cache)
    except DSparkError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True)
        return 1
    (arguments.drafter / CALIBRATION).write_text(json.dumps(result, indent=2) + "\n")
    console.print_json(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
