from dataclasses import replace

import numpy as np
import pytest

from dspark.core.cost import StepCost
from dspark.core.planner import CapacityPlanner, CausalPlanner, FixedPlanner, Planner, StepLoad
from dspark.engine.events import GateState
from dspark.engine.gate import MIN_BLOCKS, PROBE_EVERY, PROBE_ROWS, Allowance, DraftGate
from dspark.engine.history import History
from dspark.engine.pace import FEWEST_DRAFTED, FEWEST_PLAIN, FIRST_PLAIN_EVERY, MEMORY
from tests.support.world import step_cost

CHEAP = step_cost(per_token=0.01, per_draft=0.01)
NOTHING, EVERYTHING = Allowance(0, 0), Allowance(1, 99)
DEAR = step_cost(per_token=1.0, per_draft=0.1)


def load(requests: int = 1) -> StepLoad:
    """Requests with room for two draft tokens each."""
    caps = np.full(requests, 2)
    return StepLoad(requests, 0, caps=caps, weights=np.ones(requests), capacity=99)


def history(first: float = 0.9, blocks: int = MIN_BLOCKS) -> History:
    past = History(block_size=2)
    for _ in range(blocks):
        past.record(np.array([first, first / 2]), admitted=0, accepted=0)
    return past


def opened(cost: StepCost | None, planner: Planner | None = None) -> DraftGate:
    gate = DraftGate(planner or CausalPlanner(), cost)
    gate.open()
    return gate


def test_it_drafts_until_there_is_something_to_judge() -> None:
    gate = opened(DEAR)
    assert gate.decide(history(blocks=MIN_BLOCKS - 1), load()) == EVERYTHING
    assert gate.status.state is GateState.WARMING_UP
    assert gate.decide(history(0.3), load()) == NOTHING
    assert gate.status.state is GateState.PARKED


def test_parking_has_a_reason_probes_and_hysteresis() -> None:
    gate = opened(CHEAP)
    poor = history(0.0)
    decisions = [gate.decide(poor, load()) for _ in range(2 * (PROBE_EVERY + 1))]
    probe = Allowance(PROBE_ROWS, PROBE_ROWS)
    assert decisions == ([NOTHING] * PROBE_EVERY + [probe]) * 2
    assert gate.status.state is GateState.PROBING
    assert gate.status.gain is not None
    assert gate.status.gain < 0
    barely = history(0.035)  # a gain between 0 and RESUME_GAIN
    assert gate.decide(barely, load()) == NOTHING
    assert gate.decide(history(0.9), load()) == EVERYTHING
    assert gate.decide(barely, load()) == EVERYTHING
    assert gate.status.state.pays
    assert 0 < gate.status.gain < 0.03


def test_a_capacity_comes_from_history_once_there_is_one() -> None:
    gate = opened(step_cost(per_token=0.01, per_draft=0.0), CapacityPlanner())
    assert gate.decide(history(blocks=MIN_BLOCKS - 1), load()) == Allowance(1, 1)
    assert gate.decide(history(0.9), load()) == Allowance(1, 2)
    assert gate.decide(history(0.015), load()) == Allowance(1, 1)  # the second token does not pay
    assert gate.decide(history(0.015), replace(load(), determined=True)) == EVERYTHING


@pytest.mark.parametrize("planner", [CausalPlanner(), CapacityPlanner()], ids=lambda p: p.name)
def test_a_probe_verifies_something_though_history_says_nothing_pays(planner: Planner) -> None:
    gate, poor = opened(CHEAP, planner), history(0.0)
    for _ in range(PROBE_EVERY):
        assert gate.decide(poor, load()) == NOTHING
    assert gate.decide(poor, load()) == Allowance(PROBE_ROWS, PROBE_ROWS)
    assert gate.status.state is GateState.PROBING


def test_another_cost_is_judged_at_once() -> None:
    gate = opened(replace(CHEAP, draft=None))
    assert gate.status.state is GateState.NO_DATA
    assert gate.decide(history(0.3), load()) == NOTHING
    gate.use_cost(CHEAP)
    assert gate.decide(history(0.3), load()) == EVERYTHING
    gate.use_cost(DEAR)
    assert gate.decide(history(0.3), load()) == NOTHING


def test_flat_costs_are_no_data_until_others_come() -> None:
    flat = replace(CHEAP, tokens=replace(CHEAP.tokens, seconds=(1.0, 1.0)))
    gate = opened(flat)
    assert gate.decide(history(), load()) == NOTHING
    assert gate.status.state is GateState.NO_DATA
    assert gate.status.reason.startswith("the cost profile is flat")
    gate.use_cost(CHEAP)
    assert gate.decide(history(), load()) == EVERYTHING
    gate.use_cost(flat)
    assert gate.status.state is GateState.NO_DATA
    assert gate.decide(history(), load()) == NOTHING
    gate.close("gone")
    gate.use_cost(flat)
    assert gate.status.state is GateState.OFF


def test_a_baseline_is_never_parked() -> None:
    gate = opened(DEAR, FixedPlanner(2))
    assert gate.decide(history(0.0), load()) == EVERYTHING
    assert gate.status.state.pays


def test_the_state_says_whether_the_last_plan_trimmed() -> None:
    gate = opened(CHEAP)
    gate.planned(trimmed=True)
    assert gate.status.state is GateState.WARMING_UP
    for trimmed in (True, False):
        gate.planned(trimmed=trimmed)
        expected = GateState.TRIMMING if trimmed else GateState.VERIFY_ALL
        assert gate.decide(history(0.9), load()) == EVERYTHING
        assert gate.status.state is expected
    reason = gate.status.reason
    gate.planned(trimmed=True)
    assert (gate.status.state, gate.status.reason) == (GateState.TRIMMING, reason)


def test_nothing_is_drafted_while_a_drafter_is_timed() -> None:
    gate = opened(CHEAP)
    gate.close("the drafter is being timed", GateState.PROFILING)
    gate.use_cost(CHEAP)  # what the timing found, so far
    assert gate.decide(history(0.9), load()) == NOTHING
    assert gate.status.state is GateState.PROFILING
    assert not gate.likely_to_draft


def test_without_costs_nothing_is_drafted() -> None:
    gate = opened(None)
    assert gate.decide(history(), load()) == NOTHING
    assert gate.status.state is GateState.NO_DATA


def test_what_a_drafter_costs_need_not_be_known_without_one() -> None:
    gate = DraftGate(CausalPlanner(), replace(CHEAP, draft=None))
    gate.open()
    assert gate.status.state is GateState.NO_DATA
    gate.open(drafter=False)
    assert gate.status.state is GateState.WARMING_UP
    assert gate.decide(history(), load()) == EVERYTHING


def test_a_closed_gate_stays_closed() -> None:
    gate = opened(CHEAP)
    gate.close("gone")
    assert not gate.likely_to_draft
    assert gate.status.reason == "gone"


def took(gate: DraftGate, steps: int, *, drafted: bool, seconds: float, requests: int = 1) -> None:
    for _ in range(steps):
        tokens = requests * (1 + drafted)
        gate.took(drafted=drafted, requests=requests, tokens=tokens, seconds=seconds)


def test_what_was_measured_overrules_what_is_expected() -> None:
    gate = opened(CHEAP)
    assert gate.decide(history(0.9), load()) == EVERYTHING
    took(gate, FEWEST_DRAFTED, drafted=True, seconds=3.0)  # two tokens
    took(gate, FEWEST_PLAIN, drafted=False, seconds=1.0)  # one
    assert gate.decide(history(0.9), load()) == NOTHING
    assert gate.status.reason == "-33.3% measured for 1 requests"
    took(gate, MEMORY - FEWEST_PLAIN, drafted=True, seconds=1.5)
    took(gate, FEWEST_PLAIN, drafted=False, seconds=1.0)
    assert gate.decide(history(0.0), load()) == EVERYTHING
    assert gate.status.reason == "+33.3% measured for 1 requests"


def test_where_it_drafts_it_now_and_then_does_not_to_compare() -> None:
    gate = opened(CHEAP)
    took(gate, FIRST_PLAIN_EVERY, drafted=True, seconds=1.0)
    assert gate.decide(history(0.9), load()) == NOTHING
    assert gate.status.state.pays
    took(gate, 1, drafted=False, seconds=1.0)
    assert gate.decide(history(0.9), load()) == EVERYTHING


def test_no_drafts_are_left_out_beside_a_prefill() -> None:
    """Such a step is not timed, so the next one would have to go without too, and so on."""
    gate = opened(CHEAP)
    took(gate, FIRST_PLAIN_EVERY, drafted=True, seconds=1.0)
    assert (
        gate.decide(history(0.9), replace(load(), base_tokens=1 + 64, decodes=False)) == EVERYTHING
    )
    assert gate.decide(history(0.9), load()) == NOTHING


def test_a_probe_is_neither_a_plain_nor_a_drafting_step() -> None:
    gate = opened(CHEAP)
    took(gate, FEWEST_DRAFTED, drafted=True, seconds=3.0, requests=8)
    took(gate, FEWEST_PLAIN, drafted=False, seconds=1.0, requests=8)
    while gate.status.state is not GateState.PROBING:
        gate.decide(history(0.9), load(8))
    took(gate, 100, drafted=True, seconds=0.1, requests=8)
    assert gate.decide(history(0.9), load(8)) == NOTHING


def test_a_probe_of_a_lone_request_is_a_drafting_step() -> None:
    """Nothing is left out of it, so a pessimistic measurement is put right while parked."""
    gate = opened(CHEAP)
    took(gate, FEWEST_DRAFTED, drafted=True, seconds=3.0)
    took(gate, FEWEST_PLAIN, drafted=False, seconds=1.0)
    probes = 0
    while not gate.status.state.pays or not probes:
        gate.decide(history(0.9), load())
        probing = gate.status.state is GateState.PROBING
        probes += probing
        took(gate, 1, drafted=probing, seconds=1.2 if probing else 1.0)
        assert probes < 40
    assert probes > 10


def test_bad_luck_does_not_park() -> None:
    """A true gain of a quarter, tokens as they come: one to five, at one request."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        gate = opened(CHEAP)
        for step in range(800):
            drafts = gate.decide(history(0.9), load()) != NOTHING
            tokens = int(rng.choice((1, 2, 3, 4, 5), p=(0.5, 0.2, 0.15, 0.1, 0.05)))
            seconds = rng.normal(0.08, 0.008) if drafts else rng.normal(0.05, 0.005)
            gate.took(drafted=drafts, requests=1, tokens=tokens if drafts else 1, seconds=seconds)
            assert gate.status.state is not GateState.PARKED, step
