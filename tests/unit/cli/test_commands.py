"""Commands as a person calls them."""

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark.bench.planner import SIZES
from dspark.cli import app
from dspark.cli.measuring import load_all
from dspark.data import Prompt, load_prompts, save_prompts

runner = CliRunner()


def test_training_prompts_leave_out_what_is_excluded(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    make = ["train", "prompts", "chat", "--count=20", "--out"]
    assert runner.invoke(app, [*make, str(first)]).exit_code == 0
    assert runner.invoke(app, [*make, str(second), "--exclude", str(first)]).exit_code == 0
    texts = [{prompt.prompt for prompt in load_prompts(str(file))} for file in (first, second)]
    assert [len(prompts) for prompts in texts] == [20, 20]
    assert not texts[0] & texts[1]


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_without_a_server_there_is_one_line_of_error(closed_port: int) -> None:
    result = runner.invoke(app, ["generate", "hi", "--url", f"http://127.0.0.1:{closed_port}"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no server answers at http://127.0.0.1")
    assert result.stderr.count("\n") == 1


def test_a_missing_prompt_file_is_one_line_of_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.jsonl")
    result = runner.invoke(app, ["evaluate", "exactness", "--prompts", missing])
    assert result.exit_code == 1
    assert missing in result.stderr
    assert result.stderr.count("\n") == 1


def test_prompt_files_are_read_in_turns(tmp_path: Path) -> None:
    files = []
    for name, count in (("a", 3), ("b", 1)):
        files.append(tmp_path / f"{name}.jsonl")
        save_prompts(files[-1], [Prompt(f"{name}{i}", name, "text") for i in range(count)])
    assert [prompt.id for prompt in load_all(map(str, files))] == ["a0", "b0", "a1", "a2"]


def test_planning_is_timed_and_its_numbers_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "planner.json"
    command = ["bench", "planner", "--planner=capacity", "--repeats=1", f"--out={out}"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["times"]
    assert [(row["requests"], row["block_size"]) for row in rows] == list(SIZES)
    assert all(row["step_ms"] > 0 and row["verified_length"] > 1 for row in rows)


def test_a_planner_that_does_not_exist_is_one_line_of_error() -> None:
    result = runner.invoke(app, ["bench", "planner", "--planner=oracle"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: No planner is called 'oracle'")
