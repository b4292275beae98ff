import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dspark.core.errors import ConfigError
from dspark.modeling.drafters.checkpoint import load_calibration, load_drafter
from dspark.training import calibrate, export
from dspark.training.config import PRESETS, FitConfig
from dspark.training.fit import fit
from dspark.training.run_log import LOG, read_log
from dspark.training.shards import ResponseCache, Split
from tests.support.foreign import edit

SILENT = Console(quiet=True)


@pytest.fixture(scope="module")
def config(toy_target: Path, toy_shards: Path) -> FitConfig:
    return FitConfig(
        data=str(toy_shards),
        target=str(toy_target),
        steps=60,
        num_hidden_layers=1,
        target_layer_ids=(0,),
        markov_rank=8,
        draft_vocab_size=32,
        positions_per_step=64,
        num_anchors=4,
        threads=1,
        checkpoint_every=7,
        log_every=1,
    )


@pytest.fixture(scope="module")
def whole(config: FitConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    run = tmp_path_factory.mktemp("run")
    assert fit(config, run, SILENT)
    return run


def curve(run: Path) -> list[tuple[float, ...]]:
    names = ("step", "loss", "ce", "l1", "confidence", "rate", "block_size", "epoch")
    return [tuple(record[name] for name in names) for record in read_log(run)]


def test_it_learns(whole: Path, config: FitConfig) -> None:
    log = read_log(whole)
    assert [record["step"] for record in log] == list(range(1, 61))
    assert log[0]["block_size"] == 2
    assert log[-1]["block_size"] == 4
    assert log[-1]["rate"] < config.learning_rate / 100
    assert sum(r["loss"] for r in log[-5:]) < 0.9 * sum(r["loss"] for r in log[:5])


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("dspark", {"markov_head_type": "gated"}),
        ("dspark", {"markov_head_type": "rnn"}),
        ("dflash", {}),
        ("dflash", {"anchor_predicts": False}),
        ("dflash2", {}),
        ("eagle3", {}),
        ("mtp1", {}),
    ],
)
def test_every_method_learns_and_is_exported(
    method: str, fields: dict[str, object], config: FitConfig, toy_target: Path, tmp_path: Path
) -> None:
    preset = {"markov_rank": config.markov_rank} | PRESETS[method] | fields
    own = replace(config, method=method, **preset)
    assert fit(own, tmp_path / "run", SILENT)
    log = read_log(tmp_path / "run")
    assert sum(r["loss"] for r in log[-5:]) < 0.95 * sum(r["loss"] for r in log[:5])
    scores = export.export(tmp_path / "run", tmp_path / "drafter")
    assert scores.drafter["all"].accepted_length > 1.2
    model = load_drafter(tmp_path / "drafter", toy_target)
    found = calibrate.calibrate(model, ResponseCache(Path(config.data), split=Split.HELD_OUT))
    assert all(len(values) == own.block_size for values in found["temperatures"].values())


def test_a_run_can_start_from_a_drafter(whole: Path, config: FitConfig, tmp_path: Path) -> None:
    export.export(whole, tmp_path / "drafter")
    onward = replace(config, start_from=str(tmp_path / "drafter"))
    assert fit(onward, tmp_path / "run", SILENT)
    first, beginner = read_log(tmp_path / "run")[0], read_log(whole)[0]
    assert first["loss"] < 0.85 * beginner["loss"]  # of the same blocks


def test_a_drafter_of_another_shape_is_no_start(
    whole: Path, config: FitConfig, tmp_path: Path
) -> None:
    export.export(whole, tmp_path / "drafter")
    onward = replace(config, start_from=str(tmp_path / "drafter"), markov_rank=9)
    with pytest.raises(ConfigError, match="has markov_rank 8, the run 9"):
        fit(onward, tmp_path / "run", SILENT)


def test_a_drafter_whose_logits_are_shaped_is_no_start(
    whole: Path, config: FitConfig, tmp_path: Path
) -> None:
    export.export(whole, tmp_path / "drafter")
    edit(tmp_path / "drafter", dspark_serve__final_logit_softcapping=30.0)
    onward = replace(config, start_from=str(tmp_path / "drafter"))
    with pytest.raises(ConfigError, match="a soft-cap, which the losses do not know"):
        fit(onward, tmp_path / "run", SILENT)


def test_a_run_stopped_by_a_signal_goes_on_along_the_same_curve(
    whole: Path, config: FitConfig, tmp_path: Path
) -> None:
    def stop_after_a_few_steps() -> None:
        while len(read_log(tmp_path)) < 4:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop_after_a_few_steps)
    stopper.start()
    assert not fit(config, tmp_path, SILENT)
    stopper.join()
    stopped_at = len(read_log(tmp_path))
    assert 4 <= stopped_at < 60
    # A crash after a checkpoint leaves records of steps that will be done again.
    with (tmp_path / LOG).open("a") as log:
        log.write(json.dumps({"step": stopped_at + 1, "loss": 0}) + "\n")
    assert fit(replace(config, checkpoint_every=1000), tmp_path, SILENT)
    assert curve(tmp_path) == curve(whole)


def test_other_settings_are_another_run(whole: Path, config: FitConfig) -> None:
    with pytest.raises(ConfigError, match="another learning_rate, loss_decay"):
        fit(replace(config, learning_rate=1.0, loss_decay=None), whole, SILENT)


def test_features_of_other_layers_are_refused(config: FitConfig, tmp_path: Path) -> None:
    wrong = replace(config, target_layer_ids=(0, 1), aligned_start=False)
    with pytest.raises(ConfigError, match="width 32, the drafter taps 2"):
        fit(wrong, tmp_path, SILENT)


def test_a_run_by_the_clock_ends_with_its_schedule(config: FitConfig, tmp_path: Path) -> None:
    assert fit(replace(config, steps=None, minutes=0.01), tmp_path, SILENT)
    last = read_log(tmp_path)[-1]
    assert last["progress"] >= 1
    assert last["seconds"] == pytest.approx(0.6, abs=0.5)


def test_an_exported_drafter_loads_and_its_card_holds_the_figures(
    whole: Path, toy_target: Path, tmp_path: Path
) -> None:
    scores = export.export(whole, tmp_path)
    assert load_drafter(tmp_path, toy_target).config.block_size == 4
    assert set(scores.drafter) == set(scores.table) >= {"all"}
    text = (tmp_path / "README.md").read_text()
    assert f"| {scores.drafter['all'].accepted_length:.2f} " in text
    assert "60 steps" in text
    assert "Loss 0.1 CE + 0.9 L1 + 1 BCE" in text


def test_calibration_covers_both_modes_and_is_what_a_drafter_loads(
    whole: Path, toy_target: Path, config: FitConfig, tmp_path: Path
) -> None:
    export.export(whole, tmp_path)
    model = load_drafter(tmp_path, toy_target)
    cache = ResponseCache(Path(config.data), split=Split.TRAIN)
    result = calibrate.calibrate(model, cache)
    (tmp_path / "calibration.json").write_text(json.dumps(result))
    scalings = load_calibration(tmp_path, model.config)
    assert set(scalings) == {"greedy", "rejection"}
    for mode in scalings:
        before, after = result["ece_before"][mode], result["ece_after"][mode]
        assert len(before) == len(after) == len(result["ece_floor"][mode]) == 4
        assert sum(after) < sum(before) + 0.05


def test_positions_that_few_blocks_reach_stay_as_they_are() -> None:
    rng = np.random.default_rng(0)
    logits = np.full((4000, 3), 2.0, np.float32)  # says 0.88, each position holds 0.5
    accepted = np.logical_and.accumulate(rng.random((4000, 3)) < 0.5, axis=1).sum(axis=1)
    enough = calibrate.fit(calibrate.Judged(logits, accepted, np.full(4000, 3), accepted + 1))
    assert (np.array(enough.intercepts) < -1).all()
    accepted = np.minimum(accepted, 1)  # nobody gets to position 3
    few = calibrate.fit(calibrate.Judged(logits, accepted, np.full(4000, 3), accepted + 1))
    assert few.intercepts[0] == enough.intercepts[0]
    assert (few.temperatures[2], few.intercepts[2]) == (1, 0)
