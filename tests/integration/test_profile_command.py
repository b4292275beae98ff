"""`dspark profile` as a person calls it: a table now, and a profile for the next start."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dspark.cli import app

pytestmark = pytest.mark.slow


def test_a_profile_is_measured_shown_and_kept(
    tiny_settings_argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in (*tiny_settings_argv, f"--cache={tmp_path}"):
        name, _, value = flag.removeprefix("--").partition("=")
        monkeypatch.setenv(f"DSPARK_{name.replace('-', '_').upper()}", value)
    result = CliRunner().invoke(app, ["profile"])
    assert result.exit_code == 0, result.output
    for title in ("target step", "draft", "beside the curves"):
        assert title in result.stdout
    (path,) = (tmp_path / "state").glob("cost-*.json")
    cost = json.loads(path.read_text())["cost"]
    for curve in (cost["tokens"], cost["draft"]):
        assert all(f" {count} " in result.stdout for count in curve["counts"])
