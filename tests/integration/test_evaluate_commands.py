"""Evaluations as a person runs them, on the tiny models."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dspark.cli import app
from dspark.data import Prompt, save_prompts
from dspark.modeling.drafters.checkpoint import save_drafter
from tests.support.drafters import METHODS, model_on

TOKENS = 24


@pytest.fixture
def options(tiny_target_folder: Path, tiny_drafter_folder: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    domains = ("math", "chat")
    save_prompts(prompts, [Prompt(f"p{i}", domains[i % 2], f"count to {i}") for i in range(12)])
    return [
        f"--target={tiny_target_folder}",
        f"--drafter={tiny_drafter_folder}",
        f"--prompts={prompts}",
        f"--responses={tmp_path / 'answers'}",
        f"--max-tokens={TOKENS}",
        f"--out={tmp_path / 'out.json'}",
        f"--picture={tmp_path / 'picture.svg'}",
    ]


def test_acceptance_is_scored_with_and_without_the_markov_head(
    options: list[str], tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["evaluate", "acceptance", *options])
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "out.json").read_text())
    assert set(kept["drafter"]) == set(kept["without_markov"]) == {"math", "chat", "all"}
    assert kept["drafter"] != kept["without_markov"]
    for kind in ("with_lookup", "lookup_alone"):
        assert set(kept[kind]) == {"math", "chat", "all"}
        assert all(0 < own["looked_up"] <= 1 for own in kept[kind].values())
    assert kept["with_lookup"]["all"]["accepted_length"] > kept["drafter"]["all"]["accepted_length"]
    first = [kept[kind]["all"]["acceptance"][0] for kind in ("drafter", "without_markov")]
    assert len(set(first)) == 2  # the head sees the anchor: it matters from the first token on
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_calibration_is_scored_before_and_after_scaling(
    options: list[str], tiny_drafter_folder: Path, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["evaluate", "calibration", *options])
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "out.json").read_text())
    assert set(kept) == {"greedy", "rejection"}
    for both in kept.values():
        assert both["before"]["temperatures"] == [1.0] * 4
        assert both["before"]["intercepts"] == [0.0] * 4
        counts = [position["count"] for position in both["before"]["positions"]]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] >= TOKENS
    # The answers are kept, and the second time they are found: the same figures come out.
    again = CliRunner().invoke(app, ["evaluate", "calibration", *options])
    assert json.loads((tmp_path / "out.json").read_text()) == kept
    assert again.exit_code == 0
    assert np.isfinite([p["ece"] for p in kept["greedy"]["after"]["positions"]]).all()
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_a_higher_threshold_verifies_less_and_keeps_more_of_it(
    options: list[str], tmp_path: Path
) -> None:
    levels = [f"--threshold={level}" for level in (0.0, 0.2, 0.5, 1.0)]
    result = CliRunner().invoke(app, ["evaluate", "threshold", *options, *levels])
    assert result.exit_code == 0, result.output
    assert "<svg" in (tmp_path / "picture.svg").read_text()
    swept = json.loads((tmp_path / "out.json").read_text())
    scored = CliRunner().invoke(app, ["evaluate", "acceptance", *options])
    assert scored.exit_code == 0
    whole = json.loads((tmp_path / "out.json").read_text())["drafter"]
    assert set(swept) == {"math", "chat"}
    for domain, cuts in swept.items():
        assert cuts[0]["rounds"] == whole[domain]["rounds"]  # nothing is cut: the same rounds
        assert 1.2 < cuts[0]["accepted"] <= 1 + sum(whole[domain]["acceptance"])
        verified = [cut["verified"] for cut in cuts]
        assert verified == sorted(verified, reverse=True)
        assert (verified[-1], cuts[-1]["accepted"]) == (1.0, 1.0)
        assert cuts[2]["verified"] < cuts[0]["verified"]


def test_answers_of_another_evaluation_do_not_count(options: list[str], tmp_path: Path) -> None:
    """The folder of answers comes to hold sampled ones, and those to other prompts."""
    for name in ("calibration", "acceptance"):
        result = CliRunner().invoke(app, ["evaluate", name, *options, "--limit=8"])
        assert result.exit_code == 0, result.output
    few = json.loads((tmp_path / "out.json").read_text())
    again = CliRunner().invoke(app, ["evaluate", "acceptance", *options, "--limit=4"])
    assert again.exit_code == 0
    fewer = json.loads((tmp_path / "out.json").read_text())
    kinds = ("drafter", "with_lookup", "lookup_alone")
    many, less = (
        [own[kind]["all"]["rounds"] * own[kind]["all"]["accepted_length"] for kind in kinds]
        for own in (few, fewer)
    )
    assert many == pytest.approx([many[0]] * 3)  # tokens: all kinds go along the same answers
    assert less == pytest.approx([less[0]] * 3)
    assert less[0] < 0.7 * many[0]
    assert many[0] > 8 * TOKENS / 2


def test_a_picture_that_cannot_be_written_is_one_line_of_error(
    options: list[str], tmp_path: Path
) -> None:
    wrong = [*options[:-1], f"--picture={tmp_path / 'picture.xyz'}"]
    result = CliRunner().invoke(app, ["evaluate", "acceptance", *wrong])
    assert result.exit_code == 1
    assert "picture.xyz cannot be written" in result.stderr.replace("\n", "")


def test_drafters_are_compared_on_the_same_answers(
    tiny_target_folder: Path, tiny_drafter_folder: Path, options: list[str], tmp_path: Path
) -> None:
    rival = tmp_path / "rival"
    save_drafter(model_on(tiny_target_folder, **METHODS["eagle3"]), rival)
    given = [option for option in options if not option.startswith(("--drafter", "--picture"))]
    drafters = [str(tiny_drafter_folder), str(rival)]
    pictures = f"--pictures={tmp_path / 'pictures'}"
    result = CliRunner().invoke(app, ["evaluate", "compare", *drafters, *given, pictures])
    assert result.exit_code == 0, result.output
    own, other = json.loads((tmp_path / "out.json").read_text())
    assert (own["method"], other["method"]) == ("dspark", "eagle3")
    for mode in ("greedy", "rejection"):
        lengths = own["lengths"][mode]
        assert set(lengths) == {"math", "chat", "all"}
        whole = lengths["all"]
        assert whole["low"] <= whole["accepted_length"] <= whole["high"]
        least = other["lengths"][mode]["all"]["accepted_length"]
        assert whole["accepted_length"] > least >= 1.0
        assert own["gain"][mode] == {"gain": 0.0, "low": 0.0, "high": 0.0}
        gain = other["gain"][mode]
        assert gain["gain"] == pytest.approx(least / whole["accepted_length"] - 1)
        assert -1 < gain["low"] <= gain["gain"] <= gain["high"] < 0
    for times in (own["draft_ms"], own["target_ms"]):
        assert set(times) == {"1", "4", "16"}
        assert all(milliseconds > 0 for milliseconds in times.values())
    assert len(list((tmp_path / "pictures").glob("*.svg"))) == 2
    scored = CliRunner().invoke(app, ["evaluate", "acceptance", *options])
    assert scored.exit_code == 0
    alone = json.loads((tmp_path / "out.json").read_text())["drafter"]["all"]["accepted_length"]
    assert own["lengths"]["greedy"]["all"]["accepted_length"] == pytest.approx(alone)
