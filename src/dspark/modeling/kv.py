"""The paged KV cache: the tensors, and the pool that hands out their blocks."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.core.errors import OutOfBlocksError


@dataclass(frozen=True, slots=True)
class KVShape:
    num_layers: int
    kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int


class KVCache:
    """Keys and values of every layer, and optionally one fused feature a token.

    ``layers[i]`` is ``[2 * kv_heads, num_blocks, block_size, head_dim]``, all keys before all
    values, so that gathering a block table along the second dimension gives both, and a head's
    context in one piece.
    ``features`` is ``[num_blocks, block_size, feature_dim]``, or None where none are kept.
    """

    def __init__(
        self,
        shape: KVShape,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        feature_dim: int = 0,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device(device)
        size = (2 * shape.kv_heads, shape.num_blocks, shape.block_size, shape.head_dim)
        self.layers = [
            torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)
        ]
        self._slots = [layer.flatten(1, 2) for layer in self.layers]
        self.features = (
            torch.zeros(shape.num_blocks, shape.block_size, feature_dim, dtype=dtype, device=device)
            if feature_dim
            else None
        )

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store new rows. keys_values: [B, 2 * kv_heads, head_dim]; slots: [B], each
        block * block_size + offset."""
        self._slots[layer].index_copy_(1, slots, keys_values.transpose(0, 1))

    def copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks of all layers, and their features."""
        origin, copy = (torch.tensor(blocks, device=self.device) for blocks in (source, target))
        for layer in self.layers:
            layer.index_copy_(1, copy, layer.index_select(1, origin))
        if self.features is not None:
            self.features.index_copy_(0, copy, self.features.index_select(0, origin))


class BlockPool:
    """Who holds which block: a free list, reference counts and a prefix cache.

    A block is *free*, *held* (one or more references), or *idle*: held by nobody, but kept because
    its contents are published. Idle blocks are given out, least recently used first, once no free
    ones are left, or no consecutive ones: attention reads those in place. Blocks are published
    under a hash chained over all tokens up to their end, so equal tokens after different beginnings
    never meet; ``salt`` separates models and tenants.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._is_free = np.ones(num_blocks, dtype=bool)
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, those of the prefix cache included."""
        return int(self._is_free.sum()) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks with one reference each; consecutive ones if there are any.

        Raises:
            OutOfBlocksError: fewer are left. Nothing is taken then.
        """
        run = self.allocate_run(count)
        if run is not None:
            return run
        if count > self.num_free:
            raise OutOfBlocksError(
                f"{count} KV blocks are needed and {self.num_free} are left; "
                "wait for requests to end, or start with a larger KV cache"
            )
        for block in list(self._idle)[: max(count - int(self._is_free.sum()), 0)]:
            self._evict(block)
        return self._take(np.flatnonzero(self._is_free)[:count].tolist())

    def allocate_run(self, count: int) -> list[int] | None:
        """Take ``count`` consecutive blocks; None if there are no such that nobody holds.

        Of several runs the first whose published blocks have all been idle for longest.
        """
        if not 0 < count <= self.num_free:
            return [] if count == 0 else None
        in_use = np.where(self._is_free, 0.0, np.inf)
        idle = np.fromiter(self._idle, np.int64, len(self._idle))
        in_use[idle] = np.arange(1, len(idle) + 1)
        latest = _window_maxima(in_use, count)
        first = int(latest.argmin())
        if not np.isfinite(latest[first]):
            return None
        run = list(range(first, first + count))
        for block in run:
            if block in self._idle:
                self._evict(block)
        return self._take(run)

    def free(self, blocks: Sequence[int]) -> None:
        """Give one reference of each block back."""
        for block in reversed(blocks):  # a prefix's end is older than its beginning: evicted first
            if self._references[block] == 0:
                raise ValueError(f"KV block {block} is freed twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._is_free[block] = True

    def match(self, tokens: Sequence[int], salt: bytes) -> list[int]:
        """Blocks of the longest published prefix of ``tokens``, each with a new reference.

        At most ``len(tokens) - 1`` tokens match, so that at least one is left to compute.
        """
        blocks: list[int] = []
        for key in self._keys(tokens[:-1], salt):
            block = self._block_of.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def publish(self, tokens: Sequence[int], salt: bytes, blocks: Sequence[int]) -> None:
        """Offer full, committed blocks to `match`. ``tokens`` fill ``blocks`` exactly.

        Where the same prefix is published already, the older block stays the one that is found.
        """
        if len(tokens) != len(blocks) * self.block_size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(blocks)} KV blocks")
        for key, block in zip(self._keys(tokens, salt), blocks, strict=True):
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key] = block
                self._key_of[block] = key

    def _keys(self, tokens: Sequence[int], salt: bytes) -> Iterator[bytes]:
        """One key for every full block of ``tokens``."""
        key = hashlib.sha256(salt).digest()
        size = self.block_size
        for start in range(0, len(tokens) - size + 1, size):
            content = np.asarray(tokens[start : start + size], dtype=np.int64).tobytes()
            key = hashlib.sha256(key + content).digest()
            yield key

    def _evict(self, block: int) -> None:
        del self._idle[block]
        del self._block_of[self._key_of.pop(block)]
        self._is_free[block] = True

    def _take(self, blocks: list[int]) -> list[int]:
        self._is_free[blocks] = False
        for block in blocks:
            self._references[block] = 1
        return blocks


def _window_maxima(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Largest of each ``width`` neighbours, [N] -> [N - width + 1], in log(width) passes."""
    maxima, covered = values, 1
    while covered < width:
        further = min(covered, width - covered)
        maxima = np.maximum(maxima[:-further], maxima[further:])
        covered += further
    return maxima
