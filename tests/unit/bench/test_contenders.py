"""Which planners and drafters race, and under which names."""

from pathlib import Path

import pytest

from dspark.bench.contenders import Contender, parse_contenders
from dspark.core.errors import ConfigError, DrafterError


def test_a_planner_races_with_the_drafter_named_behind_it(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    found = parse_contenders(["none", "capacity", f"capacity@{tmp_path}/a", "fixed:1@ngram"])
    assert found == (
        Contender("none", ""),
        Contender("capacity", ""),
        Contender("capacity", f"{tmp_path}/a"),
        Contender("fixed:1", "ngram"),
    )
    assert [c.name for c in found] == ["none", "capacity", "capacity@a", "fixed:1@ngram"]


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["capacity"], "--planner none is missing"),
        (["none", "swift"], "No planner is called 'swift'"),
        (["none", "capacity@"], "behind the @ goes the drafter"),
        (["none", "none@runs/a"], "a planner other than none"),
        (["none", "capacity@none"], "behind the @ goes the drafter"),
        (["none", "capacity@."], "behind the @ goes the drafter"),
        (["none", "capacity@ngram", "capacity@ngram"], "capacity@ngram is there twice"),
    ],
)
def test_contenders_that_cannot_race_are_refused(texts: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_contenders(texts)


def test_a_drafter_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(DrafterError, match="'nowhere/a' is neither packaged nor a folder"):
        parse_contenders(["none", "capacity@nowhere/a"])


def test_kinds_are_told_by_the_planner_alone() -> None:
    parse = Contender.parse
    assert all(parse(name).is_reference for name in ("fixed:1@mtp1", "fixed:1"))
    assert not parse("fixed:12@fixed:1").is_reference
    assert all(parse(name).is_static for name in ("none", "fixed:1@capacity", "threshold:0.5"))
    assert not parse("capacity@fixed:1").is_static


def test_a_static_setting_is_one_for_its_own_drafter() -> None:
    own = Contender.parse("capacity@a")
    beside = [
        name
        for name in ("none", "fixed:2", "fixed:2@a", "fixed:2@b", "causal@a")
        if Contender.parse(name).is_static_beside(own)
    ]
    assert beside == ["none", "fixed:2@a"]
