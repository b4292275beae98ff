"""Speculation pays or is parked: whole engines under a virtual clock of modelled seconds."""

from collections.abc import Sequence
from itertools import pairwise

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import CausalPlanner, FixedPlanner, NonePlanner, Planner
from dspark.engine.events import GateState, StepOutcome
from dspark.engine.gate import PROBE_EVERY
from tests.support.world import VOCAB, World, endless_target, request, step_cost, target_info

BUSY = step_cost(per_token=0.4, per_draft=0.02)  # a token costs as much as it could bring
IDLE = step_cost(per_token=0.01, per_draft=0.02)


def world(cost: StepCost, accuracy: float, planner: Planner | None = None) -> World:
    return World(
        target=endless_target,
        accuracy=accuracy,
        planner=planner or CausalPlanner(),
        cost=cost,
        info=target_info(max_context=4096, num_blocks=1 << 16),
    )


def seconds(outcomes: Sequence[StepOutcome], cost: StepCost) -> float:
    """Modelled time of the steps, their drafts included."""
    total = 0.0
    for stats in (outcome.stats for outcome in outcomes):
        assert stats.predicted_seconds is not None
        drafting = stats.proposed_by_position[0] if stats.proposed_by_position else 0
        total += stats.predicted_seconds + cost.draft_seconds(drafting)
    return total


def throughput(cost: StepCost, accuracy: float, planner: Planner, requests: int) -> float:
    running = world(cost, accuracy, planner)
    for i in range(requests):
        running.engine.add(request([i % VOCAB], 200))
    running.run()
    return 200 * requests / seconds(running.outcomes, cost)


def test_it_never_costs_more_than_a_few_percent_and_gains_where_it_can() -> None:
    for cost, requests in ((IDLE, 1), (IDLE, 8), (BUSY, 1), (BUSY, 8)):
        for accuracy in (0.0, 0.4, 0.95):
            plain = throughput(cost, accuracy, NonePlanner(), requests)
            speculating = throughput(cost, accuracy, CausalPlanner(), requests)
            assert speculating > 0.97 * plain, (cost, requests, accuracy)
            if cost is IDLE and accuracy > 0.9:
                assert speculating > 1.3 * plain


def test_it_does_not_hope_for_what_the_planner_will_not_reach() -> None:
    """The causal planner stops at the jump, so drafts are wasted however cheap it is behind it."""
    cost = StepCost(
        tokens=Curve((1, 8, 9, 64), (1.0, 1.1, 1.5, 2.2)), draft=Curve((0, 8), (0.0, 0.2))
    )
    plain = throughput(cost, 0.6, NonePlanner(), requests=8)
    assert throughput(cost, 0.6, CausalPlanner(), requests=8) > 0.97 * plain


def test_a_useless_drafter_is_parked_and_probed_on_a_fixed_cadence() -> None:
    running = world(IDLE, accuracy=0.0)
    running.engine.add(request([0], 400))
    running.run()
    drafted = [o.step for o in running.outcomes if o.stats.proposed]
    parked = [step for step in drafted if step > 100]
    assert running.engine.gate.state in (GateState.PARKED, GateState.PROBING)
    assert parked
    assert {b - a for a, b in pairwise(parked)} == {PROBE_EVERY + 1}


def test_a_drafter_that_gets_better_is_drafted_again() -> None:
    running = world(IDLE, accuracy=0.0)
    key = running.engine.add(request([0], 3000))
    while running.engine.gate.state is not GateState.PARKED:
        running.step()
    running.drafter.accuracy = 0.95
    for _ in range(60 * PROBE_EVERY):
        running.step()
        if running.engine.gate.state.pays:
            break
    assert running.engine.gate.state.pays
    running.engine.cancel(key)
    running.run()


def test_the_gate_follows_the_load_at_once() -> None:
    """No probe is needed to see that the same drafts do not pay in a busy batch."""
    cost = StepCost(  # flat up to 8 rows, steep from there on
        tokens=Curve((1, 8, 64), (1.0, 1.01, 8.0)),
        draft=Curve((0, 64), (0.02, 4.0)),
    )
    running = world(cost, accuracy=0.8)
    running.engine.add(request([0], 2000))
    for _ in range(40):
        running.step()
    assert running.engine.gate.state.pays
    batch = [running.engine.add(request([i % VOCAB], 2000)) for i in range(1, 24)]
    for _ in range(3):
        running.step()
    assert running.engine.gate.state is GateState.PARKED
    for key in batch:
        running.engine.cancel(key)
    running.step()
    assert running.engine.gate.state.pays


def test_without_a_cost_profile_it_says_so_and_decodes_plainly() -> None:
    running = World(cost=None, accuracy=1.0)
    running.decode(request())
    assert running.engine.gate.state is GateState.NO_DATA
    assert running.drafter.calls == 0


def real_throughput(
    believed: StepCost, truth: StepCost, planner: Planner, accuracy: float = 0.7, requests: int = 8
) -> float:
    """Where steps take what `truth` says, which the engine can only learn by measuring."""
    running, length, total = world(believed, accuracy, planner), 600, 0.0
    for i in range(requests):
        running.engine.add(request([i % VOCAB], length))
    while running.engine.has_work:
        stats = running.step().stats
        drafting = stats.proposed_by_position[0] if stats.proposed_by_position else 0
        took = truth.overhead_seconds + truth.draft_seconds(drafting)
        took += float(
            truth.verify_seconds(stats.batch_tokens, stats.head_rows, stats.context_tokens)
        )
        running.engine.took(took)
        total += took
    return length * requests / total


def test_a_cost_surface_that_is_wrong_costs_little() -> None:
    """By expectation alone it would draft in every step, at 0.87 of the throughput."""
    truth = step_cost(per_token=1.0, per_draft=0.1)
    plain = real_throughput(IDLE, truth, NonePlanner())
    assert real_throughput(IDLE, truth, CausalPlanner()) > 0.95 * plain


def test_measuring_takes_little_of_what_speculation_gains() -> None:
    plain = real_throughput(IDLE, IDLE, NonePlanner())
    always = real_throughput(IDLE, IDLE, FixedPlanner(4))
    assert always > 1.3 * plain
    assert real_throughput(IDLE, IDLE, CausalPlanner()) > 0.96 * always
