"""Training batches from the response cache: blocks at sampled anchors, in an order that depends on
nothing but the seed, the step and how far the run has come."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dspark.core.errors import ConfigError
from dspark.training import anchors
from dspark.training.shards import CachedSequence, ResponseCache, Split


@dataclass(frozen=True, slots=True)
class Blocks:
    """A blocks of one sequence and their N counted labels, block by block."""

    taps: Tensor  # fp32 [C, n*d] of the positions before the last anchor
    tokens: Tensor  # [C + 1] of those positions and the last anchor
    anchor_positions: Tensor  # [A] int64, at most C
    places: Tensor  # [N] int64, which labels count: index into [A * block_size]
    previous: Tensor  # [A, block_size] token before each label; 0 where none counts
    label: Tensor  # [N] token id in the target's vocabulary
    target_hidden: Tensor  # fp32 [N, d] the target's final hidden state at `previous`
    log_normalizer: Tensor  # fp32 [N]

    @classmethod
    def at(
        cls,
        sequence: CachedSequence,
        positions: np.ndarray[tuple[int], np.dtype[np.int64]],
        block_size: int,
    ) -> Self:
        """Blocks after anchors at ``positions`` [A]."""
        mask = sequence.loss_mask.numpy().astype(bool)
        counted = anchors.counted_labels(mask, positions, block_size)
        by_block = torch.from_numpy(anchors.label_positions(positions, block_size))
        chosen = torch.from_numpy(counted)
        label = by_block[chosen]
        ids = sequence.ids.long()
        last = int(positions[-1])
        return cls(
            taps=sequence.taps[:last].float(),
            tokens=ids[: last + 1],
            anchor_positions=torch.from_numpy(positions),
            places=chosen.flatten().nonzero()[:, 0],
            previous=ids[(by_block - 1).clamp(max=len(ids) - 1)].where(chosen, 0),
            label=ids[label],
            target_hidden=sequence.hidden[label - 1].float(),
            log_normalizer=sequence.log_normalizer[label - 1],
        )

    @property
    def counted(self) -> Tensor:
        """bool [A, block_size], of which N are true."""
        mask = torch.zeros_like(self.previous, dtype=torch.bool)
        mask.view(-1)[self.places] = True
        return mask

    def to(self, device: torch.device) -> Self:
        """The same, there."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class DataPosition:
    """How far a run has come in its data; all that a resumed run needs to go on alike."""

    epoch: int = 0
    cursor: int = 0  # sequences of this epoch already used
    size: int = 0  # sequences in this epoch, fixed when it starts (0: not started)


class TrainingData:
    """Draws batches from a cache folder that may still be growing.

    Every epoch takes in the shards present at its start. Sequences keep their index as shards are
    added, so an epoch's size is enough to recreate its order.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        position: DataPosition | None = None,
    ) -> None:
        """Raises PromptError if the folder holds no shards."""
        self.position = position or DataPosition()
        self._folder = folder
        self._seed = seed
        self._open()

    @property
    def feature_width(self) -> int:
        """Width n * d of the cached taps."""
        return int(self._cache[0].taps.shape[1])

    def draw(self, step: int, positions: int, num_anchors: int, block_size: int) -> list[Blocks]:
        """Blocks of the next sequences, until at least ``positions`` labels count.

        At most ``num_anchors`` blocks come from one sequence; anchors depend on (seed, step) only.
        """
        rng = np.random.default_rng([self._seed, step])
        drawn: list[Blocks] = []
        missing = positions
        while missing > 0:
            sequence = self._cache[self._next_index()]
            wanted = min(num_anchors, -(-missing // block_size))
            found = anchors.sample(sequence.loss_mask.numpy().astype(bool), wanted, rng)
            if len(found) == 0:
                continue
            blocks = Blocks.at(sequence, found, block_size)
            drawn.append(blocks)
            missing -= len(blocks.label)
        return drawn

    def _next_index(self) -> int:
        if self.position.cursor == self.position.size:
            self.position = DataPosition(epoch=self.position.epoch + 1)
            self._open()
        index = int(self._order[self.position.cursor])
        self.position = replace(self.position, cursor=self.position.cursor + 1)
        return index

    def _open(self) -> None:
        self._cache = ResponseCache(self._folder, split=Split.TRAIN)
        size = self.position.size or len(self._cache)
        if not 0 < size <= len(self._cache):
            raise ConfigError(
                f"{self._folder} holds {len(self._cache)} training responses, but {size} are "
                "needed to go on; was the folder replaced, or are there no shards yet?"
            )
        self.position = replace(self.position, size=size)
        rng = np.random.default_rng([self._seed, self.position.epoch])
        self._order = rng.permutation(size)
