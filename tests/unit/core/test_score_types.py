"""The type checker refuses what would leak: current scores where only earlier ones may decide."""

import sys
from pathlib import Path

import pytest
from mypy import api

import dspark

SOURCE = Path(dspark.__file__).parents[1]

PREAMBLE = """
from dspark.core.cost import StepCost
from dspark.core.planner import CapacityPlanner, CausalPlanner, Planner, StepLoad
from dspark.core.survival import CurrentScores, DeterminedScores, HistoricalScores

def step(
    planner: Planner,
    current: CurrentScores,
    earlier: HistoricalScores,
    determined: DeterminedScores,
    load: StepLoad,
    cost: StepCost,
) -> None:
"""
ALLOWED = [
    "planner.outlook(earlier, load, cost)",
    "planner.plan(current, load, cost)",
    "planner.plan(determined, load, cost)",
]
LEAKING = [
    "planner.outlook(current, load, cost)",
    "CapacityPlanner().outlook(current, load, cost)",
    "CausalPlanner().outlook(current, load, cost)",
    "CapacityPlanner().plan(earlier, load, cost)",
    "DeterminedScores.of(earlier, ())",
    "searched: DeterminedScores = current",
    "known: HistoricalScores = current",
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The statements mypy finds an error in."""
    folder = tmp_path_factory.mktemp("types")
    statements = ALLOWED + LEAKING
    (folder / "leaking.py").write_text(PREAMBLE + "".join(f"    {line}\n" for line in statements))
    (folder / "mypy.ini").write_text(f"[mypy]\nmypy_path = {SOURCE}\nfollow_imports = silent\n")
    report, errors, _ = api.run(
        [
            f"--config-file={folder / 'mypy.ini'}",
            f"--cache-dir={folder / 'cache'}",
            f"--python-executable={sys.executable}",
            str(folder / "leaking.py"),
        ]
    )
    assert errors == ""
    first = PREAMBLE.count("\n") + 1
    lines = {int(row.split(":")[1]) for row in report.splitlines() if ": error:" in row}
    assert all(line >= first for line in lines), report
    return {statements[line - first] for line in lines}


@pytest.mark.slow
def test_only_leaking_calls_are_type_errors(refused: set[str]) -> None:
    assert refused == set(LEAKING)
