"""A run that is killed goes on along the same curve."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark.training.environment import SETTINGS
from dspark.training.run_log import read_log
from dspark.training.state import STATE

STEPS = 40


def start(shards: Path, target: Path, run: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "dspark.training.fit", f"--out={run}", f"--data={shards}",
               f"--target={target}", f"--steps={STEPS}", "--num-hidden-layers=1", "--threads=1",
               "--target-layer-ids=0", "--markov-rank=8", "--draft-vocab-size=32", "--log-every=1",
               "--positions-per-step=64", "--num-anchors=4", "--checkpoint-every=3"]  # fmt: skip
    return subprocess.Popen(command, env={**os.environ, **SETTINGS}, stderr=subprocess.DEVNULL)


def curve(run: Path) -> list[tuple[float, ...]]:
    names = ("step", "loss", "ce", "l1", "confidence", "rate", "block_size", "epoch")
    return [tuple(record[name] for name in names) for record in read_log(run)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("killed_at", [1, 22])
def test_a_killed_run_goes_on_along_the_same_curve(
    killed_at: int, whole: Path, toy_shards: Path, toy_target: Path, tmp_path: Path
) -> None:
    process = start(toy_shards, toy_target, tmp_path)
    while len(read_log(tmp_path)) < killed_at:
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert len(read_log(tmp_path)) < STEPS
    assert start(toy_shards, toy_target, tmp_path).wait() == 0
    assert curve(tmp_path) == curve(whole)
    resumed, expected = load_file(tmp_path / STATE), load_file(whole / STATE)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def whole(toy_shards: Path, toy_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    run = tmp_path_factory.mktemp("run")
    assert start(toy_shards, toy_target, run).wait() == 0
    assert len(read_log(run)) == STEPS
    return run
