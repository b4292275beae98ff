"""`dspark inspect` and `dspark convert` as a person calls them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark.cli import app
from dspark.modeling.drafters.checkpoint import load_config, save_drafter
from dspark.modeling.drafters.formats import read_layout
from tests.support.foreign import (
    edit,
    half_model_on,
    write_specforge_eagle3,
    write_speculators,
    write_zlab,
)
from tests.support.tiny import tiny_target

runner = CliRunner()
OWN_PLACE = {"method": "dflash", "anchor_predicts": False}
WIDE = {"COLUMNS": "200"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return tiny_target(folder, family="qwen3", vocab_size=64, num_layers=6)


@pytest.fixture
def calibrated(target: Path, tmp_path: Path) -> Path:
    calibration = {"temperatures": {"greedy": [1, 1, 1, 1]}}
    folder = tmp_path / "calibrated"
    save_drafter(half_model_on(target), folder, calibration=calibration, card="# It\n")
    return folder


def shown(*command: str | Path) -> str:
    result = runner.invoke(app, [str(part) for part in command], env=WIDE)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*command: str | Path) -> str:
    result = runner.invoke(app, [str(part) for part in command])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_inspect_says_what_a_folder_of_others_holds(target: Path, tmp_path: Path) -> None:
    model = half_model_on(target, **OWN_PLACE, draft_vocab_size=20, target_layer_ids=(1, 3))
    write_speculators(model, tmp_path)
    told = shown("inspect", tmp_path)
    trained = sum(parameter.numel() for parameter in model.parameters())
    for part in (
        "speculators DFlash",
        "2 of the qwen3 family, hidden size 32, MLP 64, 4 heads of 8 on 2",
        "4, from 5 rows; the anchor's row gives none",
        "the target's LM head",
        "outputs of layers 1, 3 of the target, the first being 0",
        "20 of 64 tokens",
        f"{len(list(model.parameters()))}, {trained:,} parameters in BF16",
        "d2t, embed_tokens.weight, lm_head.weight, t2d",
        "any target of its shape",
    ):
        assert part in told
    assert "layers 1, 3 of 6" in shown("inspect", tmp_path, "--target", target)


def test_inspect_counts_a_head_of_its_own(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", vocab_size=64, num_layers=6)
    fields = {"method": "eagle3", "own_head": True, "target_layer_ids": (1, 2, 4)}
    model = half_model_on(target, **fields)
    write_specforge_eagle3(model, tmp_path / "drafter")
    told = shown("inspect", tmp_path / "drafter")
    count = sum(parameter.numel() for parameter in model.parameters()) + model.head.numel()
    assert "its own LM head" in told
    assert f"{count:,} parameters" in told
    assert "4, one after the other" not in told  # its file says nothing of four


def test_inspect_shows_the_drafter_in_the_box() -> None:
    told = shown("inspect", "smollm2-135m-dspark")
    for part in ("DSpark Serve", "vanilla head of rank 128; confidence head", "12,288 of 49,152"):
        assert part in told
    assert "previous feature injected" in told


def test_what_is_no_drafter_is_one_line(target: Path, tmp_path: Path) -> None:
    known = refused("inspect", target)
    assert "no drafter of a known format: its architecture is Qwen3ForCausalLM" in known
    assert "cannot be read" in refused("inspect", tmp_path)
    assert "neither packaged nor a folder" in refused("inspect", tmp_path / "none")
    write_zlab(half_model_on(target, **OWN_PLACE), tmp_path)
    edit(tmp_path, hidden_size=64)
    assert "has shape" in refused("inspect", tmp_path)
    assert "hidden size 64, target has 32" in refused("inspect", tmp_path, "--target", target)


def test_a_drafter_goes_to_deepspec_and_back(
    calibrated: Path, target: Path, tmp_path: Path
) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    shown("convert", calibrated, there, "--to=deepspec", "--target", target)
    assert read_layout(there).format == "DeepSpec"
    assert "dspark_serve" not in json.loads((there / "config.json").read_text())
    assert "DeepSpec" in shown("inspect", there)
    shown("convert", there, back, "--to=dspark", "--target", target)
    for name in ("config.json", "model.safetensors", "calibration.json", "README.md"):
        assert (back / name).read_bytes() == (calibrated / name).read_bytes()


def test_what_others_wrote_is_written_as_ours(target: Path, tmp_path: Path) -> None:
    write_zlab(half_model_on(target, **OWN_PLACE), tmp_path / "theirs")
    shown("convert", tmp_path / "theirs", tmp_path / "ours", "--to=dspark", "--target", target)
    configs = [load_config(tmp_path / name, target) for name in ("theirs", "ours")]
    assert configs[0] == configs[1]
    assert read_layout(tmp_path / "ours").format == "DSpark Serve"


def test_what_cannot_be_converted_is_one_line(
    calibrated: Path, target: Path, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    write_zlab(half_model_on(target, **OWN_PLACE), theirs)
    to_deepspec = ("--to=deepspec", "--target", target)
    assert "anchor predicts nothing" in refused("convert", theirs, tmp_path / "out", *to_deepspec)
    assert "no empty folder" in refused("convert", theirs, calibrated, *to_deepspec)
    elsewhere = tiny_target(tmp_path / "other", family="qwen3", vocab_size=70, num_layers=6)
    wrong = refused("convert", theirs, tmp_path / "out", "--to=dspark", "--target", elsewhere)
    assert "a vocabulary of 64, target has 70" in wrong
