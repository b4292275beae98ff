"""One scheduler under the virtual clock: nothing is lost, and time is what the cost model says."""

from itertools import accumulate
from operator import mul

import pytest

from dspark.core.planner import parse_planner
from dspark.engine.admission import Limits
from dspark.sim.cell import Cell, CellResult, StepRecord
from dspark.sim.load import ClosedLoop, Load, Poisson
from dspark.sim.workload import Lengths, Workload
from tests.support.workloads import EASY, HARD, domain, step_cost, workload

COST = step_cost()
LIMITS = Limits(max_running=8, max_prefill_tokens=64, max_batch_tokens=64)
MIXED = workload(
    domain("math", output=Lengths(30, 120, 0.6)),
    domain("chat", HARD, prompt=Lengths(20, 90, 0.6), output=Lengths(12, 60, 0.8)),
)


def run(
    planner: str,
    work: Workload,
    load: Load,
    requests: int,
) -> tuple[CellResult, list[StepRecord]]:
    steps: list[StepRecord] = []
    cell = Cell(work, COST, parse_planner(planner), LIMITS, seed=3, observe=steps.append)
    return cell.run(load.arrivals(requests, 0, 1, 3)), steps


@pytest.mark.parametrize("planner", ["none", "fixed:2", "threshold:0.5", "causal", "capacity"])
@pytest.mark.parametrize("load", [ClosedLoop(6), ClosedLoop(20), Poisson(1.0)])
def test_every_request_gets_the_tokens_it_asked_for(planner: str, load: Load) -> None:
    result, steps = run(planner, MIXED, load, 40)
    assert len(result.journeys) == 40
    for journey in result.journeys:
        assert journey.usage is not None
        assert journey.usage.completion_tokens == journey.asked
        assert journey.arrived < journey.first_token <= journey.finished
    assert sum(step.committed for step in steps) == sum(j.asked for j in result.journeys)
    assert max(step.running for step in steps) <= 8
    assert all(step.accepted <= step.admitted <= step.proposed for step in steps)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_keeps_what_the_profile_says(temperature: float) -> None:
    """Drafts of a fixed length, away from the end of the output, where blocks are cut short."""
    long = workload(domain(output=Lengths(400, 400)), temperature=temperature)
    _, steps = run("fixed:4", long, ClosedLoop(8), 8)
    whole = [step for step in steps if step.proposed == 4 * step.running]
    rows = sum(step.running for step in whole)
    assert rows > 500
    expected = sum(accumulate(EASY, mul))
    assert sum(step.accepted for step in whole) / rows == pytest.approx(expected, abs=0.2)


def test_plain_decoding_takes_what_the_cost_model_says() -> None:
    """Eight requests of one length in two rounds of four, in lockstep."""
    result, steps = run("none", workload(), ClosedLoop(4), 8)
    prefill = COST.verify_seconds(40, 4, 40)
    decoding = [COST.verify_seconds(4, 4, 4 * (10 + done)) for done in range(1, 20)]
    one_round = sum(float(s) + COST.overhead_seconds for s in [prefill, *decoding])
    assert result.seconds == pytest.approx(2 * one_round, rel=1e-12)
    assert result.steps == len(steps) == 40
    assert sum(step.seconds for step in steps) == pytest.approx(result.seconds)


def test_a_draft_is_paid_for() -> None:
    result, steps = run("fixed:1", workload(), ClosedLoop(1), 1)
    drafted = [step for step in steps if step.proposed]
    assert result.drafted_steps == len(drafted) > 0
    first = drafted[0]  # the anchor is the first output token
    seconds = COST.verify_seconds(2, 2, 11) + COST.draft_seconds(1) + COST.overhead_seconds
    assert first.seconds == pytest.approx(float(seconds), rel=1e-12)


def test_an_idle_cell_waits_for_the_next_request() -> None:
    result, steps = run("none", workload(), Poisson(0.001), 3)
    busy = sum(step.seconds for step in steps)
    assert result.seconds > 5 * busy
    waits = [journey.first_token - journey.arrived for journey in result.journeys]
    assert waits == pytest.approx([steps[0].seconds] * 3)
