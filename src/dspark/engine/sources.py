"""Where drafts come from: which source drafts a row, and how far each is to be believed.

There are two at most, a drafter and the engine's own prompt lookup. Lookup drafts the rows for
which it promises more than the drafter's blocks do on average. That is decided before anything is
drafted, from committed tokens and from history: a choice that looked at drafts would bias output.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from dspark.core.planner import Planner
from dspark.core.types import Draft, DrafterInfo, DraftSource, Ints, VerificationMode
from dspark.engine.calibrator import CalibrationStatus, Calibrator, Stream
from dspark.engine.promise import Promise
from dspark.engine.repeats import BLOCK_SIZE, Repeats
from dspark.engine.sequence import Sequence as Decoded
from dspark.engine.step import Row


class Sources:
    """The drafter that was attached last, attached or not, and prompt lookup if it is on."""

    def __init__(self, planner: Planner, repeats: Repeats | None) -> None:
        self._planner = planner
        self._repeats = repeats
        self._calibrators: dict[DraftSource, Calibrator] = {}
        if repeats is not None:
            self._calibrators[DraftSource.NGRAM] = repeats.calibrator
        self._promise = Promise(block_size=0)

    @property
    def has_lookup(self) -> bool:
        return self._repeats is not None

    @property
    def widest(self) -> int:
        """Most tokens of a draft from any source."""
        return max((own.block_size for own in self._calibrators.values()), default=0)

    @property
    def calibration(self) -> dict[Stream, CalibrationStatus]:
        """See `Engine.calibration`."""
        return {
            Stream(mode, source): status
            for source, calibrator in self._calibrators.items()
            for mode, status in calibrator.status().items()
        }

    def renew(self, calibrator: Calibrator) -> None:
        """Another drafter is there, whose confidences this one calibrates."""
        self._calibrators[DraftSource.MODEL] = calibrator
        self._promise = Promise(calibrator.block_size)

    def choose(self, row: Row, drafter: DrafterInfo | None) -> None:
        """Who drafts for a decoding row, and how many tokens at most."""
        room = row.sequence.remaining - 1  # the target adds one
        size = 0 if drafter is None else drafter.block_size
        row.max_draft = min(self._planner.draft_length(size), room)
        longest = min(self._planner.draft_length(BLOCK_SIZE), room)
        if self._repeats is not None and longest:
            row.found = look_up(
                self._repeats, self._promise, row.sequence, longest, drafter_tokens=row.max_draft
            )
        if row.found is not None:
            row.max_draft = len(row.found.tokens)

    def follow(self, sequence: Decoded) -> None:
        """The target went on with a sequence."""
        if self._repeats is not None:
            self._repeats.follow(sequence)

    def confidences(self, rows: Sequence[Row]) -> NDArray[np.float64]:
        """Calibrated confidences of the drafts of the rows, 0 where there is none, [R, widest]."""
        confidences = np.zeros((len(rows), self.widest))
        for source, places, own in self._by_source(rows):
            calibrator = self._calibrators[source]
            confidences[places, : calibrator.block_size] = calibrator.confidences(
                [row.draft for row in own], _modes(own)
            )
        return confidences

    def record(
        self,
        rows: Sequence[Row],
        survival: NDArray[np.float64],
        accepted: Ints,
        admitted: Ints,
    ) -> None:
        """Learn how N judged drafts turned out: survival as planned with [N, widest], tokens
        accepted [N] and admitted [N]."""
        for source, places, own in self._by_source(rows):
            calibrator = self._calibrators[source]
            modes, blocks = _modes(own), survival[places, : calibrator.block_size]
            calibrator.record(
                [row.draft for row in own], modes, blocks, accepted[places], admitted[places]
            )
            if source is DraftSource.MODEL:
                self._promise.record(modes, blocks, np.array([row.proposed for row in own]))

    def _by_source(self, rows: Sequence[Row]) -> Iterator[tuple[DraftSource, list[int], list[Row]]]:
        """The rows that each source drafted, if any, and their places."""
        for source in self._calibrators:
            drafts = [row.draft is not None and row.draft.source is source for row in rows]
            if any(drafts):
                yield source, np.flatnonzero(drafts).tolist(), list(compress(rows, drafts))


def look_up(
    repeats: Repeats, promise: Promise, sequence: Decoded, most: int, *, drafter_tokens: int
) -> Draft | None:
    """A draft of up to `most` > 0 tokens by lookup, where as many of them are expected to be kept
    as a drafter's block of `drafter_tokens` promises."""
    found = repeats.draft(sequence, most)
    if found is None:
        return None
    draft, expected = found
    promised = promise.tokens(sequence.request.sampling.mode, drafter_tokens)
    return draft if expected >= promised else None


def _modes(rows: Iterable[Row]) -> list[VerificationMode]:
    return [row.sequence.request.sampling.mode for row in rows]
