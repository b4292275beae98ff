"""Accepted length on held-out greedy responses, without running the target.

A greedy response is what the target commits, so a draft is accepted as far as it repeats it. Blocks
are drafted at every position at once; the rounds of a decoding run are those that a walk from the
first response token meets, each round starting at the token that the last one committed last.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.core.statistics import accepted_length, prefix_survival
from dspark.modeling.drafters.heads import SequentialHead, certainty
from dspark.modeling.drafters.interface import Drafter
from dspark.training import anchors
from dspark.training.ngram_table import NgramTable
from dspark.training.shards import CachedSequence
from dspark.training.starts import proposable

Ints = NDArray[np.int64]

BLOCKS_AT_ONCE = 64
"""Blocks of one forward; more would only make its attention mask larger."""

_ALL = "all"


@dataclass(frozen=True, slots=True)
class Rounds:
    """Decoding rounds of one or more responses, [N] each."""

    accepted: Ints  # draft tokens kept
    countable: Ints  # draft tokens that the response is long enough to judge
    committed: Ints  # accepted plus, unless the response ended, the bonus


@dataclass(frozen=True, slots=True)
class Score:
    """How a drafter did on the responses of one domain."""

    rounds: int
    accepted_length: float
    acceptance: tuple[float, ...]  # share of rounds accepted through position k


@dataclass(frozen=True, slots=True)
class GreedyBlocks:
    tokens: Ints  # [A, block_size]
    confidence_logits: NDArray[np.float32]  # [A, block_size]


def evaluate(
    sequences: Iterable[CachedSequence], draft: Callable[[CachedSequence, Ints], Ints], size: int
) -> dict[str, Score]:
    """Scores by domain and for all, of the greedy responses among ``sequences``.

    draft: sequence and anchor positions [A] -> greedy blocks [A, size].
    """
    found: dict[str, list[Rounds]] = {}
    for sequence in sequences:
        positions = anchors.candidates(sequence.loss_mask.numpy().astype(bool))
        if sequence.info.temperature == 0 and len(positions):
            rounds = greedy_rounds(sequence, positions, draft(sequence, positions))
            found.setdefault(sequence.info.domain, []).append(rounds)
    domains = {**found, _ALL: [rounds for parts in found.values() for rounds in parts]}
    return {name: _score(parts, size) for name, parts in domains.items() if parts}


@torch.inference_mode()
def draft_greedily(
    model: Drafter, sequence: CachedSequence, positions: Ints, *, sequential: bool = True
) -> GreedyBlocks:
    """Blocks after anchors at ``positions`` [A], with their raw confidences, as served; or, without
    ``sequential``, as they would be without the sequential head."""
    features = model.fuse(sequence.taps[: positions[-1]].float())
    ids = sequence.ids.long()
    vocabulary = torch.from_numpy(proposable(model))
    size = model.config.block_size
    head = model.sequential_head if sequential else SequentialHead()
    tokens, confidences = [], []
    for start in range(0, len(positions), BLOCKS_AT_ONCE):
        at = torch.from_numpy(positions[start : start + BLOCKS_AT_ONCE])
        last = int(at[-1])
        opened = model.open_blocks(features[:last], ids[: last + 1], at, size)
        previous, state = ids[at], head.start(len(at))
        rows: list[Tensor] = []
        block: list[Tensor] = []
        confidence: list[Tensor] = []
        while len(block) < size:
            if len(rows) == len(block):
                rows += opened.rows(previous).unbind(1)
            row = rows[len(block)]
            vectors, state = head.step(row, previous, state)
            logits = head.combine(model.base_logits(row), vectors)
            learnt = model.confidence(row, previous)
            confidence.append(certainty(logits.softmax(-1).amax(-1)) if learnt is None else learnt)
            previous = vocabulary[logits.argmax(-1)]
            block.append(previous)
        tokens.append(torch.stack(block, 1))
        confidences.append(torch.stack(confidence, 1))
    return GreedyBlocks(torch.cat(tokens).numpy(), torch.cat(confidences).numpy())


def table_drafter(table: NgramTable, block_size: int) -> Callable[[CachedSequence, Ints], Ints]:
    return lambda sequence, positions: table.draft(
        sequence.ids.numpy().astype(np.int64), positions, block_size
    )


def greedy_accepted(sequence: CachedSequence, positions: Ints, drafted: Ints) -> tuple[Ints, Ints]:
    """Draft tokens kept, and judged, at every anchor: two [A]. drafted: [A, block_size]."""
    mask = sequence.loss_mask.numpy().astype(bool)
    block_size = drafted.shape[1]
    counted = anchors.counted_labels(mask, positions, block_size)
    padded = np.concatenate([sequence.ids.numpy(), np.zeros(block_size, np.int32)])
    equal = drafted == padded[anchors.label_positions(positions, block_size)]
    kept = np.logical_and.accumulate(equal & counted, axis=1)
    return kept.sum(axis=1), counted.sum(axis=1)


def greedy_rounds(sequence: CachedSequence, positions: Ints, drafted: Ints) -> Rounds:
    accepted, countable = greedy_accepted(sequence, positions, drafted)
    met = walk(accepted)
    left = len(accepted) - met  # response tokens after the anchor
    return Rounds(accepted[met], countable[met], np.minimum(accepted[met] + 1, left))


def walk(accepted: Ints) -> Ints:
    """Which of A neighbouring anchors decoding meets. accepted: [A] draft tokens kept at each."""
    met, at = [], 0
    while at < len(accepted):
        met.append(at)
        at += int(accepted[at]) + 1
    return np.array(met, dtype=np.int64)


def _score(parts: list[Rounds], size: int) -> Score:
    accepted = np.concatenate([rounds.accepted for rounds in parts])
    countable = np.concatenate([rounds.countable for rounds in parts])
    committed = np.concatenate([rounds.committed for rounds in parts])
    survival = prefix_survival(accepted, countable, size)
    return Score(len(accepted), accepted_length(committed), tuple(survival.tolist()))
