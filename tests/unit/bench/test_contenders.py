"""Which planners and drafters race, and under which names."""

import pytest

from dspark.bench.contenders import Contender, is_reference, is_static, parse_contenders
from dspark.core.errors import ConfigError


def test_a_planner_races_with_the_drafter_named_behind_it() -> None:
    found = parse_contenders(["none", "capacity", "capacity@runs/a", "fixed:1@ngram"])
    assert found == (
        Contender("none", ""),
        Contender("capacity", ""),
        Contender("capacity", "runs/a"),
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
        (["none", "capacity@x/a", "capacity@y/a"], "capacity@a is there twice"),
    ],
)
def test_contenders_that_cannot_race_are_refused(texts: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_contenders(texts)


def test_kinds_are_told_by_the_planner_alone() -> None:
    assert is_reference("fixed:1@mtp1")
    assert is_reference("fixed:1")
    assert not is_reference("fixed:12@fixed:1")
    assert all(is_static(name) for name in ("none", "fixed:1@capacity", "threshold:0.5"))
    assert not is_static("capacity@fixed:1")
