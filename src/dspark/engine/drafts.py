"""Drafts as the engine receives them: are they usable, how likely is each token, and cutting them.

A drafter is never trusted: what does not fit is dropped, and the row is decoded plainly.
"""

from math import isnan

import numpy as np

from dspark.core import calibration
from dspark.core.errors import DrafterError
from dspark.core.types import Draft, DrafterInfo, Floats, VerificationMode


def is_usable(draft: Draft, num_draft: int, mode: VerificationMode, vocab_size: int) -> bool:
    """Whether a draft is in sync, no longer than asked for, complete for `mode`, in range."""
    tokens = draft.tokens.tolist()
    length = len(tokens)
    per_token = [draft.confidence_logits]
    if mode is VerificationMode.REJECTION:
        if draft.q is None or draft.cut is None or _is_ragged(draft.hidden, length):
            return False
        per_token += [draft.q, draft.cut]
    return (
        draft.in_sync
        and length <= num_draft
        and (not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size))
        and all(len(values) == length for values in per_token)
        and not any(any(map(isnan, values.tolist())) for values in per_token)
    )


def _is_ragged(rows: bytes, count: int) -> bool:
    """Whether these bytes cannot be `count` rows of equal, positive width."""
    return count > 0 and (not rows or len(rows) % count != 0)


def cut(draft: Draft, length: int) -> Draft | None:
    """The first `length` tokens of a draft, None for none."""
    if length == 0:
        return None
    if length == len(draft.tokens):
        return draft

    def head(values: Floats | None) -> Floats | None:
        return None if values is None else values[:length]

    return Draft(
        key=draft.key,
        tokens=draft.tokens[:length],
        confidence_logits=draft.confidence_logits[:length],
        q=head(draft.q),
        cut=head(draft.cut),
        hidden=draft.hidden[: len(draft.hidden) // len(draft.tokens) * length],
    )


class Calibrator:
    """Turns confidence logits into calibrated confidences, by verification mode.

    Raises DrafterError for a drafter whose temperatures do not cover its block; a mode it has no
    temperatures for stays as it is.
    """

    def __init__(self, info: DrafterInfo) -> None:
        self._temperatures = {
            mode: np.asarray(info.temperatures.get(mode, (1.0,) * info.block_size))
            for mode in VerificationMode
        }
        for mode, temperatures in self._temperatures.items():
            if len(temperatures) < info.block_size or not np.all(temperatures > 0):
                raise DrafterError(
                    f"Drafter {info.name} needs {info.block_size} positive calibration "
                    f"temperatures for {mode}, got {temperatures.tolist()}: calibrate it again."
                )

    def confidences(self, draft: Draft, mode: VerificationMode) -> calibration.Array:
        """Probability of each drafted token to be kept, given that those before it were, [k]."""
        return calibration.apply(draft.confidence_logits, self._temperatures[mode])
