"""Prompt lookup: drafts of what repeats itself, made by the engine, without a drafter.

How often such a draft is right is known of every token the target commits, drafted or not: would
the text before it have foretold it? So its confidences come from counting, by the length of the
match and by whether other occurrences went on alike; the estimate is blind to what was drafted,
admitted or drawn.
"""

import numpy as np
from numpy.typing import NDArray

from dspark.core import ngram
from dspark.core.running_rates import RunningRates
from dspark.core.types import Draft, DrafterInfo, DraftSource, Floats, VerificationMode
from dspark.engine.calibrator import Calibrator
from dspark.engine.sequence import Sequence

BLOCK_SIZE = 16
"""Most tokens of a draft."""

RECKON_EVERY = 32
"""Outcomes for which the rates stand; a thousand are remembered."""

_FORETOLD = (0.2, 0.5, 0.6, 0.67, 0.72, 0.76, 0.78, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.91, 0.92)
"""How often a text goes on as behind a match of 1, 2, ... tokens, to start from."""


class Repeats:
    """The engine's own source of drafts."""

    def __init__(self) -> None:
        self._foretold = {mode: _Foretold() for mode in VerificationMode}
        self.calibrator = Calibrator(DrafterInfo(0, "prompt lookup", "", "", BLOCK_SIZE, "", ""))

    def follow(self, sequence: Sequence) -> None:
        """Take in what the target processed of the prompt, or committed, and learn from the
        latter."""
        index, tokens = sequence.ngrams, sequence.tokens
        index.advance(min(sequence.computed_len, len(sequence.request.prompt)))
        if sequence.committed_len == len(sequence.request.prompt):
            return
        foretold = self._foretold[sequence.request.sampling.mode]
        while index.length < len(tokens):
            if match := index.match():
                right = tokens[match.behind] == tokens[index.length]
                foretold.record(match, right)
            index.advance(index.length + 1)

    def draft(self, sequence: Sequence, most: int) -> tuple[Draft, float] | None:
        """A draft of up to `most` > 0 tokens, and how many of them the target is expected to keep;
        None where nothing repeats itself."""
        index = sequence.ngrams
        index.advance(sequence.committed_len)  # a prompt's last token is an anchor before its chunk
        match = index.match()
        if match is None:
            return None
        count = min(most, BLOCK_SIZE)
        foretold = self._foretold[sequence.request.sampling.mode]
        tokens = index.continuation(match, count)
        draft = Draft(
            sequence.key,
            np.array(tokens, np.int64),
            foretold.logits[match.agreement, match.length - 1, :count],
            source=DraftSource.NGRAM,
        )
        return draft, float(foretold.kept[match.agreement, match.length - 1, count - 1])


class _Foretold:
    """How often the next tokens were as behind a match.

    Of the first of them by agreement and length of the match; of those behind it by length alone,
    because agreement says something of one token only: once that is right, the match is another.
    """

    def __init__(self) -> None:
        rest = _FORETOLD[-1:] * (ngram.LONGEST_MATCH - len(_FORETOLD))
        self._first = RunningRates((_FORETOLD + rest) * len(ngram.Agreement))
        self._further = RunningRates(_FORETOLD + rest)
        self._recorded = 0
        self._tables: tuple[Floats, NDArray[np.float64]] | None = None

    def record(self, match: ngram.Match, right: bool) -> None:
        self._first.record(match.agreement * ngram.LONGEST_MATCH + match.length - 1, right)
        self._further.record(match.length - 1, right)
        self._recorded += 1
        if self._recorded % RECKON_EVERY == 0:
            self._tables = None

    @property
    def logits(self) -> Floats:
        """[Agreement, LONGEST_MATCH, BLOCK_SIZE] log-odds of each token if those before it were
        right, by the length of the match less 1. Each token that is right makes it longer."""
        return self._computed()[0]

    @property
    def kept(self) -> NDArray[np.float64]:
        """[Agreement, LONGEST_MATCH, BLOCK_SIZE] expected tokens kept of the first 1, 2, ..."""
        return self._computed()[1]

    def _computed(self) -> tuple[Floats, NDArray[np.float64]]:
        if self._tables is None:
            longest = ngram.LONGEST_MATCH
            lengths = np.add.outer(np.arange(longest), np.arange(BLOCK_SIZE))
            rates = self._further.rates()[np.minimum(lengths, longest - 1)]
            rates = np.repeat(rates[None], len(ngram.Agreement), axis=0)
            rates[:, :, 0] = self._first.rates().reshape(-1, longest)
            rates = np.clip(rates, 1e-3, 1 - 1e-3)
            kept = np.cumsum(np.cumprod(rates, axis=-1), axis=-1)
            self._tables = np.log(rates / (1 - rates)).astype(np.float32), kept
        return self._tables
