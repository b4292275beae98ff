"""What trimming destroys and spares, measured on rows that are verified whole."""

import pytest

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import CausalPlanner, FixedPlanner, ThresholdPlanner
from dspark.engine.admission import Limits
from dspark.engine.drafting import CAP_ACCEPT_ROWS
from tests.support.world import VOCAB, World, endless_target, request, step_cost, target_info

EVERY = 4


class FirstOfBlock(FixedPlanner):
    """Drafts whole blocks and verifies one token of each, whatever they are worth."""

    def __init__(self) -> None:
        super().__init__(1)

    def draft_length(self, block_size: int) -> int:
        return block_size


def world(requests: int, planner=None, **other) -> World:
    running = World(
        target=endless_target,
        planner=planner or FirstOfBlock(),
        info=target_info(max_context=4096, num_blocks=1 << 16),
        **other,
    )
    for i in range(requests):
        running.engine.add(request([i % VOCAB], 300))
    return running


def test_what_a_perfect_drafter_loses_is_what_was_trimmed() -> None:
    running = world(1, accuracy=1.0, cap_accept_every=EVERY)
    running.run()
    shadowed = [o.stats for o in running.outcomes if o.stats.destroyed or o.stats.spared]
    assert len(shadowed) > 10
    for stats in shadowed[:-1]:  # the output may end within the last one
        assert (stats.destroyed, stats.spared) == (3, 0)
        assert stats.verified_lengths == (5,)
    others = [o.stats for o in running.outcomes if not (o.stats.destroyed or o.stats.spared)]
    assert max(length for stats in others for length in stats.verified_lengths) == 2


def test_a_useless_drafter_loses_nothing() -> None:
    running = world(1, accuracy=0.0, cap_accept_every=EVERY)
    running.run()
    assert sum(o.stats.destroyed for o in running.outcomes) == 0
    assert sum(o.stats.spared for o in running.outcomes) > 0


def test_the_share_destroyed_is_the_one_that_verifying_everything_would_have_kept() -> None:
    """The sample against the truth: the same drafter and target, every block verified whole."""
    sampled, whole = (
        world(3, planner, accuracy=0.7, cap_accept_every=every)
        for planner, every in ((FirstOfBlock(), EVERY), (FixedPlanner(4), 0))
    )
    for running in (sampled, whole):
        running.run()
    destroyed = sum(o.stats.destroyed for o in sampled.outcomes)
    spared = sum(o.stats.spared for o in sampled.outcomes)
    by_position = [
        sum(counts)
        for counts in zip(
            *(o.stats.accepted_by_position for o in whole.outcomes if o.stats.proposed), strict=True
        )
    ]
    proposed = sum(o.stats.proposed_by_position[0] for o in whole.outcomes if o.stats.proposed)
    assert destroyed / (destroyed + spared) == pytest.approx(
        sum(by_position[1:]) / (3 * proposed), abs=0.08
    )


def test_a_busy_step_pays_for_a_few_rows_and_every_row_has_its_turn() -> None:
    running = world(10, accuracy=0.7, cap_accept_every=1)
    seen = set()
    for _ in range(30):
        batch = running.engine.plan(running.begin_and_draft())
        whole = [row.key for row in batch.rows if row.draft and len(row.draft.tokens) == 4]
        assert len(whole) <= CAP_ACCEPT_ROWS
        seen.update(whole)
        running.verify_and_commit(batch)
    assert len(seen) == 10


def test_nothing_is_widened_beyond_the_limits_of_a_step() -> None:
    running = world(4, accuracy=1.0, cap_accept_every=1, limits=Limits(max_batch_tokens=12))
    running.run()
    assert max(o.stats.batch_tokens for o in running.outcomes) <= 12


def test_it_leaves_the_measured_pace_alone() -> None:
    """Steps that verify more than planned are no measure of what planning is worth."""
    cost = StepCost(tokens=Curve((0, 100), (1.0, 101.0)), draft=Curve((0, 100), (0.0, 0.0)))
    running = world(1, CausalPlanner(), accuracy=0.9, cost=cost, cap_accept_every=1)
    for _ in range(40):
        outcome = running.step()
        running.engine.took(50.0 if outcome.stats.admitted else 1.0)
    assert "expected" in running.engine.gate.reason


def test_a_threshold_planner_is_measured_too() -> None:
    running = world(2, ThresholdPlanner(0.9), accuracy=0.7, cap_accept_every=EVERY)
    running.run()
    assert sum(o.stats.spared + o.stats.destroyed for o in running.outcomes) > 0
    assert running.cost == step_cost()
