"""The response cache on disk: what the target wrote, and what it computed while writing it.

A cache is a folder of shards ``shard-00000.safetensors``, each with the tensors

============== ============= ================================================================
ids            int32 [T]     token ids of all its sequences, end to end (prompt, then response)
loss_mask      uint8 [T]     1 on response tokens, the end-of-sequence token included
taps           bf16 [T, n*d] outputs of the tapped decoder layers at that token
hidden         bf16 [T, d]   hidden state after the final norm (the head's input)
log_normalizer fp32 [T]      logsumexp of the target's logits over its whole vocabulary there
offsets        int64 [S+1]   where each sequence begins in T
============== ============= ================================================================

and one metadata entry ``sequences``: a JSON list with id, domain, temperature, split
(``train`` or ``heldout``) and finish reason of each. ``hidden[u - 1]`` scores the token ``ids[u]``.
The last token of a sequence was never fed back to the target: its features are zero. So is
``log_normalizer`` wherever no response token follows.

Shards appear whole or not at all, so a killed writer loses only the sequences it still held, and
several writers may share a folder.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.core.errors import PromptError

HELDOUT_PERCENT = 2
_FIELDS = ("ids", "loss_mask", "taps", "hidden", "log_normalizer")


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "heldout"


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    id: str
    domain: str
    temperature: float
    split: str
    finish: str  # "stop" | "length"


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """One answered prompt of L tokens; tensors are views of the shard's memory map."""

    info: SequenceInfo
    ids: Tensor  # int32 [L]
    loss_mask: Tensor  # uint8 [L]
    taps: Tensor  # bf16 [L, n*d]
    hidden: Tensor  # bf16 [L, d]
    log_normalizer: Tensor  # fp32 [L]


def id_hash(sequence_id: str, purpose: str) -> int:
    """A 64-bit hash of the id: choices made by it survive restarts and reordering."""
    return int.from_bytes(hashlib.sha256(f"{purpose}:{sequence_id}".encode()).digest()[:8], "big")


def split_of(sequence_id: str) -> Split:
    return Split.HELD_OUT if id_hash(sequence_id, "split") % 100 < HELDOUT_PERCENT else Split.TRAIN


class ShardWriter:
    """Collects finished sequences and writes a shard each time it holds ``per_shard`` of them."""

    def __init__(self, folder: Path, per_shard: int = 64) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._per_shard = per_shard
        self._pending: list[CachedSequence] = []

    def add(self, sequence: CachedSequence) -> None:
        self._pending.append(sequence)
        if len(self._pending) >= self._per_shard:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        held, self._pending = self._pending, []
        lengths = torch.tensor([0, *(len(sequence.ids) for sequence in held)])
        tensors = {
            name: torch.cat([getattr(sequence, name) for sequence in held]) for name in _FIELDS
        }
        tensors["offsets"] = lengths.cumsum(0)
        index = json.dumps([asdict(sequence.info) for sequence in held])
        scratch = self._folder / f"{os.getpid()}.partial"
        save_file(tensors, scratch, metadata={"sequences": index})
        _claim_next_number(scratch)


def _claim_next_number(scratch: Path) -> None:
    """Give the file the next free shard name; safe among several writers of one folder."""
    folder = scratch.parent
    number = 1 + max((_number(path) for path in shard_paths(folder)), default=-1)
    while True:
        try:
            os.link(scratch, folder / f"shard-{number:05d}.safetensors")
        except FileExistsError:
            number += 1
        else:
            scratch.unlink()
            return


class ResponseCache:
    """Random access to all sequences of a cache folder."""

    def __init__(self, folder: Path, split: Split | None = None) -> None:
        """Index the shards (headers only); ``split`` keeps only its sequences.

        Raises:
            PromptError: the folder holds no shards.
        """
        self._shards = [_Shard(path) for path in shard_paths(folder)]
        if not self._shards:
            raise PromptError(f"{folder} holds no response shards; create them by regenerating")
        self.infos: list[SequenceInfo] = []
        self._where: list[tuple[int, int]] = []
        for number, shard in enumerate(self._shards):
            for place, info in enumerate(shard.infos):
                if split is None or info.split == split:
                    self.infos.append(info)
                    self._where.append((number, place))

    def __len__(self) -> int:
        return len(self.infos)

    def __getitem__(self, index: int) -> CachedSequence:
        number, place = self._where[index]
        return self._shards[number].sequence(place)

    def __iter__(self) -> Iterator[CachedSequence]:
        return (self[index] for index in range(len(self)))


class _Shard:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.infos = read_infos(path)
        self._tensors: dict[str, Tensor] | None = None

    def sequence(self, place: int) -> CachedSequence:
        if self._tensors is None:  # mapped at first use; the operating system pages it in and out
            with safe_open(self._path, framework="pt") as file:
                self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        begin, end = self._tensors["offsets"][place : place + 2].tolist()
        fields: dict[str, Any] = {name: self._tensors[name][begin:end] for name in _FIELDS}
        return CachedSequence(info=self.infos[place], **fields)


def read_infos(path: Path) -> list[SequenceInfo]:
    with safe_open(path, framework="pt") as file:
        return [SequenceInfo(**record) for record in json.loads(file.metadata()["sequences"])]


def finished_tokens(folder: Path) -> dict[str, int]:
    """Response tokens of every sequence in finished shards: what a restart need not do again."""
    done = {}
    for path in shard_paths(folder):
        shard = _Shard(path)
        for place, info in enumerate(shard.infos):
            done[info.id] = int(shard.sequence(place).loss_mask.sum())
    return done


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"), key=_number)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("shard-"))
