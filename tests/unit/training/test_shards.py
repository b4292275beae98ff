from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dspark.core.errors import PromptError
from dspark.training.shards import (
    CachedSequence,
    ResponseCache,
    SequenceInfo,
    ShardWriter,
    Split,
    finished_tokens,
    shard_paths,
    split_of,
)


def sequence(name: str, length: int, split: Split = Split.TRAIN) -> CachedSequence:
    torch.manual_seed(length)
    return CachedSequence(
        info=SequenceInfo(name, "math", 0.7, split, "stop"),
        ids=torch.randint(0, 100, (length,), dtype=torch.int32),
        loss_mask=(torch.arange(length) >= 2).to(torch.uint8),
        taps=torch.randn(length, 6).bfloat16(),
        hidden=torch.randn(length, 3).bfloat16(),
        log_normalizer=torch.randn(length),
    )


def assert_same(left: CachedSequence, right: CachedSequence) -> None:
    assert left.info == right.info
    for name in ("ids", "loss_mask", "taps", "hidden", "log_normalizer"):
        assert torch.equal(getattr(left, name), getattr(right, name))


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = [sequence(f"p{i}", 3 + i) for i in range(5)]
    writer = ShardWriter(tmp_path, per_shard=2)
    for one in written:
        writer.add(one)
    assert len(shard_paths(tmp_path)) == 2
    writer.flush()
    cache = ResponseCache(tmp_path)
    assert len(cache) == 5
    for read, one in zip(cache, written, strict=True):
        assert_same(read, one)
    assert_same(cache[3], written[3])


def test_only_whole_shards_are_ever_seen(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, per_shard=2)
    for i in range(3):
        writer.add(sequence(f"p{i}", 4))
    assert finished_tokens(tmp_path) == {"p0": 2, "p1": 2}  # p2 is lost with a killed run
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.safetensors"]


def test_two_writers_share_a_folder(tmp_path: Path) -> None:
    writers = [ShardWriter(tmp_path, per_shard=1), ShardWriter(tmp_path, per_shard=1)]
    for i in range(4):
        writers[i % 2].add(sequence(f"p{i}", 4))
    assert [info.id for info in ResponseCache(tmp_path).infos] == ["p0", "p1", "p2", "p3"]


def test_splits_are_read_apart(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.add(sequence("a", 3))
    writer.add(sequence("b", 5, split=Split.HELD_OUT))
    writer.flush()
    assert [info.id for info in ResponseCache(tmp_path, Split.HELD_OUT).infos] == ["b"]
    assert len(ResponseCache(tmp_path, Split.HELD_OUT)[0].ids) == 5


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no response shards"):
        ResponseCache(tmp_path)


def test_the_split_is_a_small_fixed_share() -> None:
    names = [f"prompt-{i}" for i in range(5000)]
    heldout = [name for name in names if split_of(name) == Split.HELD_OUT]
    assert 50 <= len(heldout) <= 150
    assert heldout == [name for name in names if split_of(name) == Split.HELD_OUT]


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, per_shard=2)
    writer.add(sequence("a", 3))
    writer.add(sequence("b", 5))
    with safe_open(tmp_path / "shard-00000.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} == {
        "ids": (torch.int32, (8,)),
        "loss_mask": (torch.uint8, (8,)),
        "taps": (torch.bfloat16, (8, 6)),
        "hidden": (torch.bfloat16, (8, 3)),
        "log_normalizer": (torch.float32, (8,)),
        "offsets": (torch.int64, (3,)),
    }
    assert tensors["offsets"].tolist() == [0, 3, 8]
