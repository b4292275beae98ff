"""`dspark simulate` as a person calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark.cli import app

runner = CliRunner()
PLANNERS = ["--planner=none", "--planner=causal"]
WORKLOAD = """
source = "a test"
[domains.math]
acceptance = [0.9, 0.8]
auc = 0.8
prompt = { mean = 10, longest = 20, sigma = 0.5 }
output = { mean = 10, longest = 20, sigma = 0.5 }
"""


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    workload = tmp_path / "small.toml"
    workload.write_text(WORKLOAD)
    trace = [f"--workload={workload}", "--requests=12", "--concurrency=4"]
    return ["simulate", "--cost=l4:qwen3-4b", *trace]


def test_the_same_seed_writes_the_same_log_byte_for_byte(tmp_path: Path, small: list[str]) -> None:
    logs = [tmp_path / name for name in ("first", "again", "other")]
    for log, seed in zip(logs, (1, 1, 2), strict=True):
        command = [*small, *PLANNERS, "--cells=2", f"--seed={seed}", f"--log={log}"]
        assert runner.invoke(app, command).exit_code == 0
    first, again, other = (log.read_bytes() for log in logs)
    assert first == again != other
    lines = [json.loads(line) for line in first.splitlines()]
    assert {(line["planner"], line["cell"]) for line in lines} == {
        ("none", 0), ("none", 1), ("causal", 0), ("causal", 1),
    }  # fmt: skip


def test_figures_are_printed_and_kept(tmp_path: Path, small: list[str]) -> None:
    out = tmp_path / "out.json"
    result = runner.invoke(app, [*small, *PLANNERS, f"--out={out}"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    assert all(word in result.stdout for word in ("causal", "verified", "math"))
    kept = json.loads(out.read_text())
    assert kept["scenario"]["requests"] == 12
    assert kept["scenario"]["workload"]["source"] == "a test"
    plain, causal = kept["planners"]
    assert plain["all"]["requests"] == causal["all"]["requests"] == 12
    assert plain["all"]["tokens"] == causal["all"]["tokens"]
    assert plain["all"]["trimmed"] is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--workload=gpt", "no workload 'gpt'"),
        ("--cost=gpt", "no cost 'gpt'"),
        ("--planner=best", "'best'"),
        ("--rate=3", "exclude each other"),
        ("--cells=5", "use more users"),
        ("--log=/nowhere/steps.jsonl", "cannot be written"),
        ("--cells=13", "13 cells"),
    ],
)
def test_what_cannot_be_is_one_line(small: list[str], wrong: str, said: str) -> None:
    result = runner.invoke(app, [*small, wrong])
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert len([line for line in result.stderr.splitlines() if "simulated" not in line]) == 1


def test_presets_and_a_rate_are_enough() -> None:
    command = ["simulate", "--rate=5", "--requests=4", "--planner=none"]
    assert runner.invoke(app, command).exit_code == 0
