import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.core.errors import ConfigError, PromptError
from dspark.training.dataset import Blocks, DataPosition, TrainingData
from dspark.training.shards import ResponseCache
from tests.support.responses import PROMPT_TOKENS, RESPONSE_TOKENS, write_responses


@pytest.fixture(scope="module")
def shards(toy_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_responses(folder, toy_target, count=14)
    return folder


def open_data(shards: Path, position: DataPosition | None = None) -> TrainingData:
    return TrainingData(shards, 3, position)


def assert_same(left: list[Blocks], right: list[Blocks]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for name in Blocks.__slots__:
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_rows_line_up(shards: Path) -> None:
    sequence = ResponseCache(shards)[0]
    last = PROMPT_TOKENS + RESPONSE_TOKENS - 1
    blocks = Blocks.at(sequence, np.array([PROMPT_TOKENS, last - 2]), 4)
    # Anchor p has four labels; last - 2 has two before the sequence ends.
    label = torch.tensor([*range(PROMPT_TOKENS + 1, PROMPT_TOKENS + 5), last - 1, last])
    assert blocks.counted.sum(1).tolist() == [4, 2]
    assert torch.equal(blocks.label, sequence.ids[label].long())
    assert torch.equal(blocks.previous[blocks.counted], sequence.ids[label - 1].long())
    assert not blocks.previous[~blocks.counted].any()
    assert torch.equal(blocks.tokens, sequence.ids[: last - 1].long())
    assert torch.equal(blocks.target_hidden, sequence.hidden[label - 1].float())
    assert torch.equal(blocks.log_normalizer, sequence.log_normalizer[label - 1])
    assert torch.equal(blocks.taps, sequence.taps[: last - 2].float())


def test_a_batch_has_the_positions_asked_for_from_several_sequences(shards: Path) -> None:
    batch = open_data(shards).draw(0, positions=40, num_anchors=5, block_size=3)
    assert sum(len(blocks.label) for blocks in batch) >= 40
    assert all(len(blocks.anchor_positions) <= 5 for blocks in batch)
    for blocks in batch:
        assert len(blocks.log_normalizer) == int(blocks.counted.sum())


def test_a_run_resumed_anywhere_draws_the_same_batches(shards: Path) -> None:
    whole = open_data(shards)
    for step in range(12):  # several epochs
        resumed = open_data(shards, whole.position)
        assert_same(whole.draw(step, 30, 5, 2), resumed.draw(step, 30, 5, 2))
    assert whole.position.epoch > 1


def test_a_growing_folder_changes_the_next_epoch_and_not_the_running_one(
    shards: Path, toy_target: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(shards, folder)
    before = open_data(folder)
    before.draw(0, 10, 5, 2)
    middle = before.position
    expected = open_data(folder, middle).draw(1, 20, 5, 2)
    write_responses(folder, toy_target, count=4, first=100)
    resumed = open_data(folder, middle)
    assert_same(resumed.draw(1, 20, 5, 2), expected)
    while resumed.position.epoch == 0:
        resumed.draw(2, 10, 5, 2)
    assert resumed.position.size > middle.size


def test_missing_shards_are_named(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=str(tmp_path)):
        open_data(tmp_path)
    with pytest.raises(ConfigError, match="1000 are"):
        open_data(shards, DataPosition(epoch=2, cursor=1, size=1000))
