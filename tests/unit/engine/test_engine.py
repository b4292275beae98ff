"""What goes over the border in each call, and what the engine does with a reply that is wrong."""

from dataclasses import replace

import pytest

from dspark.core.errors import ConflictingStepError, DrafterError, StaleStepError
from dspark.core.planner import CapacityPlanner, CausalPlanner, FixedPlanner, NonePlanner
from dspark.core.types import (
    DraftReply,
    RowStatus,
    SamplingParams,
    Scaling,
    SequenceKey,
    VerifyBatch,
)
from dspark.engine.admission import Limits
from dspark.engine.events import GateState
from tests.support.world import (
    World,
    block,
    drafter_info,
    plain_decoding,
    request,
    scripted_target,
    step_cost,
)


def world(**options) -> World:
    options = {"planner": FixedPlanner(4), "target": scripted_target(1, [1]), **options}
    return World(**options)


def plan(running: World) -> VerifyBatch:
    return running.engine.plan(running.begin_and_draft())


def test_nothing_to_do_is_no_step() -> None:
    engine = World().engine
    assert not engine.has_work
    assert engine.begin() is None


def test_calls_out_of_order_are_refused() -> None:
    running = world()
    running.engine.add(request())
    with pytest.raises(RuntimeError):
        running.engine.plan(None)
    running.engine.begin()
    with pytest.raises(RuntimeError):
        running.engine.begin()
    with pytest.raises(RuntimeError):
        running.engine.took(0.1)
    batch = running.engine.plan(None)
    with pytest.raises(RuntimeError):
        running.engine.draft_batch()
    running.verify_and_commit(batch)
    running.run()


def test_accounts_may_wait_for_the_next_step_but_no_longer() -> None:
    running = world()
    running.engine.add(request(max_tokens=12))
    running.step()
    with pytest.raises(RuntimeError, match="without a step"):
        running.engine.account()
    events = running.engine.commit(running.verifier.verify(plan(running)))
    running.engine.begin()
    verdicts = running.verifier.verify(running.engine.plan(None))
    with pytest.raises(RuntimeError, match="not accounted"):
        running.engine.commit(verdicts)
    outcome = running.engine.account()
    assert outcome.events == events
    assert outcome.stats.accepted > 0
    running.engine.commit(verdicts)
    running.engine.account()
    running.run()


def test_prefill_shares_a_budget_first_come_first_served() -> None:
    running = world(limits=Limits(max_prefill_tokens=6))
    for length in (4, 7, 1):
        running.engine.add(request([0] * length, 4))
    running.verifier.prefix_cache = False
    chunks = []
    for _ in range(3):
        batch = plan(running)
        chunks.append({row.key.sequence: row.num_pending for row in batch.rows})
        running.verify_and_commit(batch)
    assert chunks == [{0: 4, 1: 2}, {0: 1, 1: 5, 2: 1}, {0: 1, 1: 1, 2: 1}]
    assert [outcome.stats.prefill_tokens for outcome in running.outcomes] == [6, 6, 0]
    assert [outcome.stats.rows for outcome in running.outcomes] == [1, 3, 3]


def test_drafts_leave_room_for_the_target_s_own_token() -> None:
    running = world(accuracy=1.0)
    running.engine.add(request(max_tokens=4))
    running.step()
    assert running.engine.begin() is not None
    batch = running.engine.draft_batch()
    assert batch is not None
    assert batch.rows[0].num_draft == 2  # three tokens are left, one of them the target's
    running.verify_and_commit(running.engine.plan(running.drafter.draft(batch)))
    running.run()


def test_the_last_token_is_not_drafted_and_brings_no_features() -> None:
    running = world(accuracy=0.0)
    running.engine.add(request(max_tokens=3))
    running.step()
    batch = plan(running)
    assert batch.rows[0].draft is not None
    assert not batch.rows[0].want_features
    running.verify_and_commit(batch)
    assert running.begin_and_draft() is None
    running.verify_and_commit(running.engine.plan(None))
    running.run()


def test_a_lost_draft_is_fetched_once_and_drafting_goes_on() -> None:
    running = world(accuracy=1.0)
    running.engine.add(request(max_tokens=30))
    running.step()
    assert running.begin_and_draft() is not None
    running.verify_and_commit(running.engine.plan(None))  # it came too late
    start = running.engine.begin()
    assert start is not None
    assert [(f.start, f.stop) for f in start.fetch] == [(0, 2)]
    running.answer(start.fetch)
    batch = running.engine.draft_batch()
    assert batch is not None
    assert batch.rows[0].base_committed_len == 0
    running.verify_and_commit(running.engine.plan(running.drafter.draft(batch)))
    assert running.outcomes[-1].stats.accepted == 4
    assert plan(running).rows[0].draft is not None  # nothing left to fetch
    running.engine.verifier_lost()
    running.run()


def test_a_drafter_that_lost_a_sequence_is_counted_and_synchronised() -> None:
    running = world(accuracy=1.0)
    running.engine.add(request(max_tokens=40))
    for _ in range(2):
        running.step()
    running.drafter.sequences.clear()
    assert running.step().stats.resynced == 1
    assert running.step().stats.accepted == 4
    running.run()


def test_a_reply_of_another_drafter_is_not_used() -> None:
    running = world(accuracy=1.0)
    running.engine.add(request(max_tokens=30))
    running.step()
    reply = running.begin_and_draft()
    running.drafter.restart()
    running.engine.attach_drafter(running.drafter.info)
    batch = running.engine.plan(reply)
    assert batch.rows[0].draft is None
    running.verify_and_commit(batch)
    assert running.step().stats.accepted == 4
    running.run()


def test_a_drafter_that_is_replaced_while_verifying_leaves_no_history() -> None:
    running = world(accuracy=1.0)
    running.engine.add(request(max_tokens=30))
    running.step()
    batch = plan(running)
    running.engine.attach_drafter(drafter_info(block_size=2, incarnation=99))
    running.verify_and_commit(batch)
    running.engine.attach_drafter(None)
    running.run()


def test_bad_calibration_refuses_the_drafter_and_keeps_the_engine() -> None:
    running = world()
    with pytest.raises(DrafterError):
        running.engine.attach_drafter(
            replace(drafter_info(incarnation=5), calibration={"greedy": Scaling.none(3)})
        )
    running.decode(request())


def test_a_planner_that_never_drafts_says_so() -> None:
    running = world(planner=NonePlanner())
    assert running.engine.gate.state is GateState.OFF
    assert "none" in running.engine.gate.reason
    running.decode(request())
    assert running.drafter.calls == 0


def test_replies_of_another_step_are_refused_before_anything_changes() -> None:
    running = world()
    key = running.engine.add(request(max_tokens=6))
    running.step()
    reply = running.begin_and_draft()
    assert reply is not None
    with pytest.raises(StaleStepError):
        running.engine.plan(DraftReply(reply.step - 1, reply.drafts, 0.0))
    batch = running.engine.plan(reply)
    verdicts = running.verifier.verify(batch)
    with pytest.raises(StaleStepError):
        running.engine.commit(replace(verdicts, step=batch.step - 1))
    running.engine.verifier_lost()
    running.run()
    assert len(running.output(key).tokens) == 6


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"status": RowStatus.STALE}, StaleStepError),
        ({"status": RowStatus.CONFLICT}, ConflictingStepError),
        ({"accepted": 5}, ConflictingStepError),
        ({"computed_len": 1}, ConflictingStepError),
        ({"next_token": None}, ConflictingStepError),
    ],
)
def test_verdicts_that_do_not_fit_are_refused_and_recovered_from(change: dict, error: type) -> None:
    wanted = request(max_tokens=12)
    running = world(accuracy=0.5)
    key = running.engine.add(wanted)
    running.step()
    reply = running.verifier.verify(plan(running))
    bad = replace(reply, verdicts=(replace(reply.verdicts[0], **change),))
    with pytest.raises(error, match="Sequence 0 in step 2"):
        running.engine.commit(bad)
    running.engine.verifier_lost()
    running.run()
    assert running.output(key) == plain_decoding(running.target, request(max_tokens=12))


@pytest.mark.parametrize("lost", ["unknown", "missing"])
def test_a_sequence_the_verifier_does_not_know_is_opened_again(lost: str) -> None:
    running = world()
    key = running.engine.add(request(max_tokens=12))
    running.step()
    reply = running.verifier.verify(plan(running))
    unknown = replace(reply.verdicts[0], status=RowStatus.UNKNOWN)
    verdicts = (unknown,) if lost == "unknown" else ()
    assert running.engine.commit(replace(reply, verdicts=verdicts)) == ()
    assert running.engine.account().stats.reopened == 1
    batch = plan(running)
    assert batch.rows[0].open is not None
    assert batch.rows[0].open.tokens == (0, 1)
    running.verify_and_commit(batch)
    running.run()
    assert len(running.output(key).tokens) == 12


def test_cancelling_frees_the_workers_at_the_next_step() -> None:
    running = world()
    keys = [running.engine.add(request(max_tokens=30)) for _ in range(2)]
    for _ in range(2):
        running.step()
    running.engine.cancel(keys[0])
    running.engine.cancel(SequenceKey(7, 99))
    assert running.engine.num_running == 1
    running.step()
    assert list(running.verifier.sequences) == list(running.drafter.sequences) == [keys[1]]
    running.engine.cancel(keys[1])
    running.step()  # nothing runs: the closes travel alone
    assert not running.verifier.sequences
    assert not running.drafter.sequences
    assert not running.engine.has_work


def test_cancelling_a_waiting_request_needs_no_step() -> None:
    running = world()
    running.engine.cancel(running.engine.add(request()))
    assert not running.engine.has_work


def test_closes_wait_for_a_drafter_that_is_away_and_die_with_it() -> None:
    running = world()
    key = running.engine.add(request(max_tokens=30))
    for _ in range(2):
        running.step()
    running.engine.attach_drafter(None)
    running.engine.cancel(key)
    running.run()
    assert running.drafter.sequences
    running.engine.attach_drafter(running.drafter.info)
    running.run()
    assert not running.drafter.sequences


def test_stats_of_a_step_with_drafts() -> None:
    running = world(target=scripted_target(1, [1, 1, 1, 2]), accuracy=1.0)
    running.engine.add(request(max_tokens=40, stop=("c",)))
    assert running.step().stats.verified_lengths == ()
    stats = running.step().stats
    assert stats.proposed_by_position == stats.admitted_by_position == (1, 1, 1, 1)
    assert stats.accepted_by_position == (1, 1, 1, 0)  # the third ends the output
    assert (stats.verified_lengths, stats.accepted_lengths) == ((5,), (3,))
    assert (stats.trimmed, stats.rows, stats.running) == (0, 1, 0)
    assert stats.predicted_seconds == pytest.approx(1.05)
    running.run()


def test_another_cost_is_for_the_steps_that_follow() -> None:
    running = world(accuracy=1.0, planner=CausalPlanner())
    running.engine.add(request(max_tokens=40))
    running.step()
    reply = running.begin_and_draft()
    running.engine.use_cost(step_cost(per_token=100.0))
    running.verify_and_commit(running.engine.plan(reply))
    begun, after = running.outcomes[-1].stats, running.step().stats
    assert begun.admitted == 4
    assert begun.predicted_seconds == pytest.approx(1.05)
    assert after.admitted == 0


def test_a_new_drafter_is_told_everything_without_being_asked_twice() -> None:
    running = world(accuracy=1.0)
    running.engine.add(request(max_tokens=40))
    for _ in range(2):
        running.step()
    running.drafter.restart()
    running.engine.attach_drafter(running.drafter.info)
    stats = running.step().stats
    assert (stats.resynced, stats.accepted) == (0, 4)
    running.run()


def test_features_behind_a_gap_are_not_asked_for() -> None:
    running = world(accuracy=1.0)
    running.engine.add(request(max_tokens=40))
    running.step()
    assert running.begin_and_draft() is not None
    batch = running.engine.plan(None)  # the drafter's state is unknown: it will all be fetched
    assert not batch.rows[0].want_features
    running.verify_and_commit(batch)
    batch = plan(running)
    assert batch.rows[0].want_features
    running.verify_and_commit(batch)
    running.run()


def test_only_what_the_planner_admits_reaches_the_verifier() -> None:
    running = world(planner=CausalPlanner(), cost=step_cost(per_token=0.8, per_draft=0.0))
    running.engine.add(request(max_tokens=40))
    running.step()
    reply = running.begin_and_draft()
    assert reply is not None
    draft = block(reply.drafts[0].key, [1, 1, 1, 1], [5.0, 5.0, -5.0, 5.0])
    verify = running.engine.plan(DraftReply(reply.step, (draft,), 0.0))
    assert verify.rows[0].draft is not None
    assert len(verify.rows[0].draft.tokens) == 2
    stats = running.verify_and_commit(verify).stats
    assert (stats.proposed, stats.admitted, stats.accepted, stats.trimmed) == (4, 2, 2, 2)
    running.run()


@pytest.mark.parametrize(
    ("temperature", "admitted"),
    [(1.0, [1, 1]), (0.0, [0, 4])],  # nothing known: a token for the row; determined: what pays
)
def test_current_scores_set_the_capacity_only_where_nothing_is_sampled(
    temperature: float, admitted: list[int]
) -> None:
    sampling, lengths = SamplingParams(temperature=temperature), []
    for logit in (-9.0, 9.0):
        running = world(planner=CapacityPlanner())
        running.engine.add(request(max_tokens=40, sampling=sampling))
        running.step()
        reply = running.begin_and_draft()
        assert reply is not None
        draft = block(reply.drafts[0].key, [1, 1, 1, 1], [logit] * 4, mode=sampling.mode)
        running.verify_and_commit(running.engine.plan(DraftReply(reply.step, (draft,), 0.0)))
        lengths.append(running.outcomes[-1].stats.admitted)
        running.run()
    assert lengths == admitted


def test_a_heavy_request_gets_the_larger_share() -> None:
    running = world(planner=CapacityPlanner(), limits=Limits(max_batch_tokens=5))
    keys = [
        running.engine.add(replace(request(max_tokens=40), weight=weight))
        for weight in (1.0, 1.0, 3.0)
    ]
    running.step()
    reply = running.begin_and_draft()
    assert reply is not None
    verify = running.engine.plan(reply)
    lengths = {row.key: 0 if row.draft is None else len(row.draft.tokens) for row in verify.rows}
    assert lengths == {keys[0]: 0, keys[1]: 0, keys[2]: 2}
    running.verify_and_commit(verify)
    running.run()


def test_what_is_cancelled_while_drafting_is_not_verified() -> None:
    running = world()
    keys = [running.engine.add(request(max_tokens=20)) for _ in range(2)]
    running.step()
    reply = running.begin_and_draft()
    running.engine.cancel(keys[0])
    verify = running.engine.plan(reply)
    assert [row.key for row in verify.rows] == [keys[1]]
    assert verify.close == (keys[0],)
    running.verify_and_commit(verify)
    running.run()
