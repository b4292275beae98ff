"""Two processes over gloo against one."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from dspark.training.config import PRESETS, FitConfig
from dspark.training.dataset import TrainingData
from dspark.training.environment import SETTINGS
from dspark.training.fit import fit
from dspark.training.loop import TeacherForcing, Trainer
from dspark.training.parallel import ALONE, Ranks, joined_ranks
from dspark.training.run_log import read_log
from dspark.training.shards import ResponseCache
from dspark.training.starts import new_model
from dspark.training.state import STATE


def config_of(method: str, target: Path, shards: Path) -> FitConfig:
    fields = {
        "data": str(shards),
        "target": str(target),
        "method": method,
        "steps": 8,
        "target_layer_ids": (0,),
        "num_hidden_layers": 1,
        "draft_vocab_size": 32,
        "positions_per_step": 64,
        "num_anchors": 4,
        "threads": 1,
        "checkpoint_every": 5,
        "log_every": 1,
    }
    return FitConfig(**{"markov_rank": 8} | PRESETS[method] | fields)


def gradients(config: FitConfig, ranks: Ranks) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = new_model(config, Path(config.target), ResponseCache(Path(config.data)))
    forcing = TeacherForcing(model, config.loss_weights, config.loss_decay or 1.0)
    trainer = Trainer(forcing, config.clip, ranks)
    batch = TrainingData(Path(config.data), seed=1).draw(0, 100, 5, config.block_size)
    batch = batch[: len(batch) - 1 + len(batch) % 2]  # odd: the parts differ in size
    figures = trainer.gradients(batch)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"figures": figures, **found}


def start(command: list[str], processes: int, **environment: str) -> None:
    """As torchrun does, without its agent: fewer processes, and errors come through."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            env={
                **os.environ,
                **SETTINGS,
                **environment,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": str(processes),
                "RANK": str(rank),
            },
        )
        for rank in range(processes)
    ]
    assert [process.wait(timeout=120) for process in started] == [0] * processes


def test_two_processes_find_the_gradients_of_one(
    toy_target: Path, toy_shards: Path, tmp_path: Path
) -> None:
    """Of every method."""
    configs = {method: config_of(method, toy_target, toy_shards) for method in PRESETS}
    for method, config in configs.items():
        (tmp_path / f"{method}.json").write_text(json.dumps(asdict(config)))
    start(["-m", "tests.unit.training.test_parallel", str(tmp_path)], 2)
    for method, config in configs.items():
        alone = gradients(config, ALONE)
        for rank in range(2):
            together = load_file(tmp_path / f"{method}-{rank}.safetensors")
            assert together.keys() == alone.keys()
            for name, expected in alone.items():
                scale = max(float(expected.abs().max()), 1e-3)
                torch.testing.assert_close(together[name], expected, rtol=0, atol=1e-5 * scale)


def test_a_run_of_two_processes_is_that_of_one(
    toy_target: Path, toy_shards: Path, tmp_path: Path
) -> None:
    config = config_of("dspark", toy_target, toy_shards)
    assert fit(config, tmp_path / "one", Console(quiet=True))
    command = ["-m", "dspark.training.fit", "--out", str(tmp_path / "two")]
    for name in ("data", "target", "steps", "num_hidden_layers", "markov_rank", "draft_vocab_size",
                 "positions_per_step", "num_anchors", "threads", "log_every"):  # fmt: skip
        command += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    command += ["--target-layer-ids", "0"]
    start(command, 2)
    # Equal up to rounding: the command multiplies in bf16 where the CPU can, `fit` alone does not.
    one, two = (read_log(tmp_path / run) for run in ("one", "two"))
    assert len(one) == len(two) == 8
    for first, second in zip(one, two, strict=True):
        assert first["accepted_length"] == pytest.approx(second["accepted_length"], abs=0.03)
        assert first["loss"] == pytest.approx(second["loss"], abs=0.03)
    weights = [load_file(tmp_path / run / STATE) for run in ("one", "two")]
    for name, expected in weights[0].items():
        if name.startswith("model."):
            torch.testing.assert_close(
                weights[1][name].float(), expected.float(), rtol=0, atol=0.02
            )


if __name__ == "__main__":
    with joined_ranks() as own:
        for file in sorted(Path(sys.argv[1]).glob("*.json")):
            raw = json.loads(file.read_text())
            settings = FitConfig(**{**raw, "target_layer_ids": tuple(raw["target_layer_ids"])})
            result = gradients(settings, own)
            save_file(result, file.with_name(f"{file.stem}-{own.rank}.safetensors"))
