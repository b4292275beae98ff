"""What is read off the results of a bench."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dspark.bench.frontier import Rivalry, interactive, matched, rivalries
from dspark.bench.load import Answer
from dspark.bench.pictures import draw
from dspark.bench.serving import (
    Lengths,
    ServeOptions,
    Summary,
    by_domain,
    in_turns,
    read_summaries,
    still_racing,
)
from dspark.cli import app
from dspark.core.errors import ConfigError
from dspark.data import Prompt


def answer(domain: str, *, steps: int, proposed: int, admitted: int, accepted: int) -> Answer:
    return Answer(
        prompt=Prompt("id", domain, "text"),
        token_ids=(1, 2),
        seconds=2.0,
        first_seconds=1.0,
        steps=steps,
        proposed=proposed,
        admitted=admitted,
        accepted=accepted,
    )


def summary(
    planner: str,
    concurrency: int,
    throughput: float,
    user_rate: float,
    rounds: tuple[float, ...] = (),
) -> Summary:
    return Summary(
        transport="grpc",
        concurrency=concurrency,
        planner=planner,
        tokens=100,
        throughput=throughput,
        user_rate=user_rate,
        slow_user_rate=0.5 * user_rate,
        ratio=1.0,
        ratio_low=None,
        rounds=rounds or (throughput,),
        by_domain={"chat": Lengths(2.0, 1.5, 0.5), "math": Lengths(3.0, 2.5, 0.25)},
        verified_length=2.5,
        accepted_length=2.0,
        trimmed_share=0.3,
        step_ms=50.0,
        batch_tokens=4.0,
        overhead=0.05,
        part_ms={"verify": 40.0},
    )


ROWS = [
    summary("fixed:1", 1, 30, 30),
    summary("fixed:1", 8, 100, 16),
    summary("causal", 1, 40, 40),
    summary("causal", 8, 120, 20),
    summary("none", 1, 20, 20),
    summary("none", 8, 110, 15),
    summary("capacity", 1, 60, 20),
    summary("capacity", 4, 50, 10),  # a bad moment: beaten by the point above
    summary("capacity", 8, 110, 12),
]


def test_an_adaptive_planner_is_paired_with_the_best_static_one() -> None:
    rows = [
        summary("none", 4, 100, 25, rounds=(80.0, 120.0, 100.0)),
        summary("fixed:2", 4, 110, 28, rounds=(90.0, 130.0, 110.0)),
        summary("causal", 4, 108, 27, rounds=(99.0, 117.0, 110.0)),
        summary("causal", 8, 200, 25),  # nothing to compare with
    ]
    (found,) = rivalries(rows)
    assert found == Rivalry(
        "grpc", 4, "causal", "fixed:2", pytest.approx(326 / 330), pytest.approx(0.9)
    )
    (brief,) = rivalries([summary("none", 4, 100, 25), summary("causal", 4, 90, 25)])
    assert (brief.ratio, brief.low) == (pytest.approx(0.9), None)  # one round is no interval


def test_a_lucky_round_does_not_choose_its_own_rival() -> None:
    rows = [
        summary("none", 4, 100, 25, rounds=(100.0, 100.0, 100.0)),
        summary("fixed:2", 4, 110, 28, rounds=(90.0, 90.0, 150.0)),
        summary("causal", 4, 100, 25, rounds=(100.0, 100.0, 100.0)),
    ]
    (found,) = rivalries(rows)
    assert found.ratio == pytest.approx((100 + 100 + 100) / (90 + 90 + 100))


def test_neighbouring_rounds_choose_their_rival_together() -> None:
    """Of twenty rounds two are a group: the luck of one of them does not count for the other."""
    lucky = (90.0,) * 18 + (60.0, 1000.0)
    rows = [
        summary("none", 4, 100, 25, rounds=(100.0,) * 20),
        summary("fixed:2", 4, 110, 28, rounds=lucky),
        summary("causal", 4, 100, 25, rounds=(100.0,) * 20),
    ]
    (found,) = rivalries(rows)
    assert found.rival == "fixed:2"  # in the nine groups whose rivals are chosen with that luck
    assert found.ratio == pytest.approx(2000 / (18 * 90 + 2 * 100))


def test_a_setting_that_was_dropped_is_nobodys_rival() -> None:
    rows = [
        summary("none", 4, 100, 25, rounds=(100.0, 100.0, 100.0)),
        summary("fixed:7", 4, 300, 28, rounds=(300.0, 300.0)),
        summary("causal", 4, 100, 25, rounds=(100.0, 100.0, 100.0)),
    ]
    (found,) = rivalries(rows)
    assert (found.rival, found.ratio) == ("none", 1.0)


def test_a_planner_is_not_paired_with_what_another_drafter_does() -> None:
    rows = [
        summary("none", 4, 100, 25),
        summary("fixed:2@weak", 4, 110, 28),
        summary("fixed:2@strong", 4, 200, 28),
        summary("capacity@weak", 4, 121, 27),
    ]
    (found,) = rivalries(rows)
    assert (found.rival, found.ratio) == ("fixed:2@weak", pytest.approx(1.1))


def test_a_static_planner_leaves_for_one_with_its_own_drafter() -> None:
    options = ServeOptions(drop_below=0.9)
    rounds = {"none": 50.0, "fixed:2@weak": 60.0, "fixed:3@weak": 40.0, "fixed:2@strong": 100.0}
    ten = {name: [rate] * 10 for name, rate in rounds.items()}
    assert still_racing(ten, options) == ["none", "fixed:2@weak", "fixed:2@strong"]


def test_only_static_planners_far_behind_leave_the_race() -> None:
    strict, lax = ServeOptions(drop_below=0.9), ServeOptions()
    nine = {"none": [50.0] * 9, "fixed:1": [50.0] * 9, "fixed:2": [100.0] * 9}
    nine |= {"fixed:7": [50.0] * 9, "capacity": [1.0] * 9}
    assert still_racing(nine, strict) == list(nine)  # too few rounds for a reason
    ten = {name: [*own, 80.0] for name, own in nine.items()}
    assert still_racing(ten, strict) == ["none", "fixed:1", "fixed:2", "capacity"]
    assert still_racing(ten, lax) == list(ten)
    more = {name: [*own, 90.0] for name, own in ten.items() if name != "fixed:7"}
    assert still_racing(more | {"fixed:7": ten["fixed:7"]}, lax) == list(more)  # it stays away


def test_planners_are_compared_at_the_throughput_of_the_reference() -> None:
    found = {(m.reference, m.concurrency, m.planner): m.user_rate for m in matched(ROWS)}
    assert found == {
        ("fixed:1", 1, "none"): pytest.approx(20 - 5 * 10 / 90),
        ("fixed:1", 8, "none"): pytest.approx(20 - 5 * 80 / 90),
        ("fixed:1", 8, "causal"): pytest.approx(40 - 20 * 60 / 80),
        ("fixed:1", 8, "capacity"): pytest.approx(20 - 8 * 40 / 50),
    }


def test_a_reference_may_have_another_drafter() -> None:
    rows = [replace(row, planner=f"{row.planner}@mtp1") for row in ROWS if row.planner == "fixed:1"]
    rows += [row for row in ROWS if row.planner == "causal"]
    (found,) = matched(rows)
    assert (found.reference, found.planner) == ("fixed:1@mtp1", "causal")
    assert found.user_rate == pytest.approx(40 - 20 * 60 / 80)


def test_a_promised_speed_counts_users_of_whom_nine_in_ten_get_it() -> None:
    found = {row.planner: (row.users, row.throughput) for row in interactive(ROWS, [9.0])}
    assert found == {
        "fixed:1": (1, 30),
        "causal": (8, 120),
        "none": (1, 20),
        "capacity": (1, 60),
    }
    assert {row.users for row in interactive(ROWS, [1000.0])} == {0}


def test_lengths_by_domain_are_pooled_over_decode_steps() -> None:
    answers = [
        answer("chat", steps=11, proposed=40, admitted=10, accepted=5),
        answer("chat", steps=31, proposed=40, admitted=30, accepted=15),
        answer("math", steps=5, proposed=0, admitted=0, accepted=0),
    ]
    assert by_domain(answers) == {
        "chat": Lengths(verified=2.0, accepted=1.5, trimmed_share=0.5),
        "math": Lengths(verified=1.0, accepted=1.0, trimmed_share=0.0),
    }


def test_results_are_read_back_reported_and_drawn(tmp_path: Path) -> None:
    thresholds = [summary(f"threshold:{s}", 8, 100, 10) for s in (0.1, 0.5)]
    rows = ROWS + thresholds
    file, pictures = tmp_path / "serving.json", tmp_path / "pictures"
    file.write_text(json.dumps({"results": [asdict(row) for row in rows]}))
    assert read_summaries(file) == rows
    result = CliRunner().invoke(
        app, ["bench", "report", str(file), "--pictures", str(pictures), "--interactivity", "9"]
    )
    assert result.exit_code == 0
    assert "+56%" in result.stdout  # causal's 25 tokens a second against 16
    assert {path.name for path in pictures.iterdir()} == {
        f"grpc-{name}.svg" for name in ("lengths", "pareto", "domains", "threshold")
    }
    assert all("<svg" in path.read_text() for path in pictures.iterdir())


def test_each_drafter_has_pictures_of_its_own(tmp_path: Path) -> None:
    rows = [summary(f"threshold:{s}@{d}", 8, 100, 10) for s in (0.1, 0.5) for d in ("a", "b")]
    rows += [summary("capacity@a", load, 100, 10) for load in (1, 8)]
    assert {path.name for path in draw(rows, tmp_path)} == {
        "grpc-lengths.svg", "grpc-pareto.svg", "grpc-domains-a.svg", "grpc-threshold-a.svg",
        "grpc-threshold-b.svg",
    }  # fmt: skip


def test_there_is_no_picture_of_a_single_point(tmp_path: Path) -> None:
    assert draw(ROWS[:1], tmp_path) == []


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds no results of this version"):
        read_summaries(file)


def test_turns_are_in_random_order_and_nobody_goes_on() -> None:
    planners, last = ["none", "fixed:1", "capacity"], "capacity"
    rng = np.random.default_rng(0)
    at = {planner: [0, 0, 0] for planner in planners}
    for _ in range(3000):
        order = in_turns(planners, last, rng)
        assert sorted(order) == sorted(planners)
        assert order[0] != last
        for place, planner in enumerate(order):
            at[planner][place] += 1
        last = order[-1]
    assert all(900 < count < 1100 for places in at.values() for count in places)
    assert in_turns(["none"], "none", rng) == ["none"]
