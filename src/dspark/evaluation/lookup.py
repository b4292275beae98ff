"""Accepted length with prompt lookup, along the target's greedy answers.

The engine's own lookup and its own choice of source (`dspark.engine.repeats`, `promise`) go through
the answers one after another, as a server would that answers them alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.core.calibration import apply
from dspark.core.statistics import accepted_length
from dspark.core.types import Ints, SamplingParams, Scaling, SequenceKey, VerificationMode
from dspark.engine.promise import Promise
from dspark.engine.repeats import Repeats
from dspark.engine.request import Request
from dspark.engine.sequence import Sequence
from dspark.engine.sources import look_up
from dspark.modeling.drafters.interface import Drafter
from dspark.training import anchors
from dspark.training.held_out import draft_greedily, greedy_accepted
from dspark.training.shards import CachedSequence

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class LookupScore:
    rounds: int
    accepted_length: float
    looked_up: float  # share of the rounds that lookup drafted


class Lookup:
    """Decodes answers with prompt lookup, beside a drafter or without one."""

    def __init__(self, model: Drafter | None, scaling: Scaling | None) -> None:
        """``scaling``: of the model's confidences in `greedy` mode."""
        size = 0 if model is None else model.config.block_size
        self._model = model
        self._scaling = scaling or Scaling.none(size)
        self._repeats = Repeats()
        self._promise = Promise(size)

    def score(self, answers: Iterable[CachedSequence]) -> dict[str, LookupScore]:
        """By domain, and for "all"."""
        found: dict[str, list[Ints]] = {}
        for answer in answers:
            if rounds := self._decode(answer):
                found.setdefault(answer.info.domain, []).append(np.array(rounds, np.int64))
        domains = {**found, "all": [rounds for parts in found.values() for rounds in parts]}
        return {name: _score(np.concatenate(parts)) for name, parts in domains.items() if parts}

    def _decode(self, answer: CachedSequence) -> list[tuple[int, bool]]:
        """Tokens committed in each round, and whether lookup drafted them."""
        ids = answer.ids.tolist()
        positions = anchors.candidates(answer.loss_mask.numpy().astype(bool))
        if len(positions) == 0:
            return []
        prompt = tuple(ids[: positions[0]])
        request = Request(prompt, len(ids) - len(prompt), _Mute(), _GREEDY)
        own = Sequence(SequenceKey(0, 0), request, len(ids))
        own.computed_len = len(prompt)
        own.commit([ids[len(prompt)]])  # comes with the prefill
        kept, survival = self._model_blocks(answer, positions)
        rounds = []
        while own.remaining:
            self._repeats.follow(own)
            start, left = own.committed_len, own.remaining
            place = start - 1 - positions[0]
            found = look_up(self._repeats, self._promise, own, left, drafter_tokens=left)
            if found is not None:
                accepted = _common(found.tokens.tolist(), ids[start:])
            else:
                accepted = int(kept[place])
                if self._model is not None:
                    block, whole = survival[place : place + 1], np.array([survival.shape[1]])
                    self._promise.record([VerificationMode.GREEDY], block, whole)
            committed = own.commit(ids[start : start + accepted + 1])
            rounds.append((len(committed), found is not None))
        return rounds

    def _model_blocks(
        self, answer: CachedSequence, positions: Ints
    ) -> tuple[Ints, NDArray[np.float64]]:
        """At every anchor: how many of its drafts the answer repeats, [A], and their survival."""
        if self._model is None:
            return np.zeros(len(positions), np.int64), np.zeros((len(positions), 0))
        blocks = draft_greedily(self._model, answer, positions)
        kept, _ = greedy_accepted(answer, positions, blocks.tokens)
        confidences = apply(blocks.confidence_logits, self._scaling)
        return kept, np.cumprod(confidences, axis=1, dtype=np.float64)


class _Mute:
    """Only token ids count here."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _common(drafted: list[int], text: list[int]) -> int:
    """How many of the drafted tokens the text begins with."""
    pairs = zip(drafted, text, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafted), len(text)))


def _score(rounds: Ints) -> LookupScore:
    committed, looked_up = rounds.T
    return LookupScore(len(rounds), accepted_length(committed), float(looked_up.mean()))
