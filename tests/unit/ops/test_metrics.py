"""Exported values are what steps said; the draft counters stay apart."""

from dataclasses import replace

import pytest
from dspark_services.scheduler.metering import MetricsObserver
from dspark_services.scheduler.observer import StepTiming

from dspark.core.reliability import PositionScores
from dspark.core.types import DraftSource
from dspark.engine.events import GateState, GateStatus, StepOutcome, StepStats
from dspark.ops.metrics import Metrics

TIMING = StepTiming(
    draft=0.01, draft_wait=0.011, plan=0.001, verify=0.1, backbone=0.08, head=0.02, wire=0.003,
    commit=0.002, total=0.116,
)  # fmt: skip


def outcome(*, gate: GateState = GateState.TRIMMING, q_gap: float = 0.0) -> StepOutcome:
    """Two rows drafted 4 and 3 tokens; 3 and 1 were admitted, 2 and 0 accepted."""
    stats = StepStats(
        rows=2,
        prefill_tokens=0,
        batch_tokens=6,
        head_rows=6,
        context_tokens=100,
        proposed_by_position=(2, 2, 2, 1),
        admitted_by_position=(2, 1, 1, 0),
        accepted_by_position=(1, 1, 0, 0),
        verified_lengths=(4, 2),
        accepted_lengths=(3, 1),
        proposed_by_source={DraftSource.MODEL: 4, DraftSource.NGRAM: 3},
        accepted_by_source={DraftSource.MODEL: 2, DraftSource.NGRAM: 0},
        destroyed=1,
        spared=2,
        resynced=1,
        reopened=0,
        waiting=0,
        running=2,
        gate=GateStatus(gate, "because"),
        verify_seconds=0.1,
        predicted_seconds=None,
        q_gap=q_gap,
    )
    return StepOutcome(1, (), stats)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("toy")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_sources_of_drafts_are_told_apart(metrics: Metrics) -> None:
    MetricsObserver(metrics).on_step(outcome(), TIMING)
    for source, proposed, accepted in (("model", 4, 2), ("ngram", 3, 0)):
        assert value(metrics, "dspark_source_proposed_tokens_total", source=source) == proposed
        assert value(metrics, "dspark_source_accepted_tokens_total", source=source) == accepted


def test_what_trimming_destroys_and_spares_is_counted(metrics: Metrics) -> None:
    MetricsObserver(metrics).on_step(outcome(), TIMING)
    assert value(metrics, "dspark_cap_accept_destroyed_tokens_total") == 1
    assert value(metrics, "dspark_cap_accept_spared_tokens_total") == 2


def test_draft_tokens_are_counted_by_stage_and_position(metrics: Metrics) -> None:
    MetricsObserver(metrics).on_step(outcome(), TIMING)
    by_stage = {
        stage: [value(metrics, f"dspark_{stage}_tokens_total", position=str(j)) for j in range(4)]
        for stage in ("proposed", "admitted", "accepted", "trimmed")
    }
    assert by_stage == {
        "proposed": [2, 2, 2, 1],
        "admitted": [2, 1, 1, None],
        "accepted": [1, 1, None, None],
        "trimmed": [None, 1, 1, 1],
    }


def test_vllm_names_give_its_mean_acceptance_length(metrics: Metrics) -> None:
    observer = MetricsObserver(metrics)
    observer.on_step(outcome(), TIMING)
    observer.on_step(outcome(), TIMING)
    name = "vllm:spec_decode_num_"
    drafts = value(metrics, f"{name}drafts_total", model_name="toy")
    accepted = value(metrics, f"{name}accepted_tokens_total", model_name="toy")
    assert (drafts, accepted) == (4, 4)  # 1 + accepted / drafts = 2 tokens a step, as committed
    assert value(metrics, f"{name}draft_tokens_total", model_name="toy") == 14
    per_position = f"{name}accepted_tokens_per_pos_total"
    assert value(metrics, per_position, model_name="toy", position="1") == 2


def test_lengths_and_seconds_are_distributions(metrics: Metrics) -> None:
    MetricsObserver(metrics).on_step(outcome(), TIMING)
    assert value(metrics, "dspark_accepted_length_sum") == 4
    assert value(metrics, "dspark_verified_length_sum") == 6
    assert value(metrics, "dspark_verified_length_count") == 2
    assert value(metrics, "dspark_step_part_seconds_sum", part="wire") == 0.003
    assert value(metrics, "dspark_target_part_seconds_sum", part="head") == 0.02
    assert value(metrics, "dspark_step_seconds_sum") == 0.116
    assert value(metrics, "dspark_batch_tokens_sum") == 6


def test_a_step_that_only_closes_sequences_is_no_step_of_the_distributions(
    metrics: Metrics,
) -> None:
    observer = MetricsObserver(metrics)
    idle = replace(
        outcome(gate=GateState.PARKED).stats,
        rows=0,
        batch_tokens=0,
        proposed_by_position=(),
        admitted_by_position=(),
        accepted_by_position=(),
        verified_lengths=(),
        accepted_lengths=(),
    )
    observer.on_step(StepOutcome(1, (), idle), TIMING)
    for name in ("dspark_step_seconds", "dspark_batch_tokens"):
        assert value(metrics, f"{name}_count") == 0
    assert value(metrics, "dspark_step_part_seconds_count", part="wire") == 0
    assert value(metrics, "dspark_target_part_seconds_count", part="head") == 0
    assert value(metrics, "dspark_gate_state", state="parked") == 1
    # A prefill chunk commits nothing, and a step answered from memory processes nothing.
    for own in ({"batch_tokens": 16}, {"rows": 1}):
        observer.on_step(StepOutcome(2, (), replace(idle, **own)), TIMING)
    assert value(metrics, "dspark_step_seconds_count") == 2


def test_target_seconds_are_compared_with_what_was_expected(metrics: Metrics) -> None:
    known = outcome()
    known = replace(known, stats=replace(known.stats, predicted_seconds=0.2))
    for each in (known, outcome()):
        MetricsObserver(metrics).on_step(each, TIMING)
    assert value(metrics, "dspark_target_seconds_over_expected_count") == 1
    assert value(metrics, "dspark_target_seconds_over_expected_sum") == 0.5


def test_one_gate_state_is_on(metrics: Metrics) -> None:
    observer = MetricsObserver(metrics)
    for current in (GateState.TRIMMING, GateState.PARKED):
        observer.on_step(outcome(gate=current), TIMING)
        shown = {s: value(metrics, "dspark_gate_state", state=s.value) for s in GateState}
        assert shown == {state: float(state is current) for state in GateState}


def test_the_largest_q_gap_stays(metrics: Metrics) -> None:
    observer = MetricsObserver(metrics)
    for gap in (1e-6, 3e-6, 2e-6):
        observer.on_step(outcome(q_gap=gap), TIMING)
    assert value(metrics, "dspark_q_gap_max") == 3e-6


def test_fallbacks_are_counted_by_reason(metrics: Metrics) -> None:
    observer = MetricsObserver(metrics)
    observer.on_fallback("drafter")
    observer.on_step(outcome(), TIMING)
    assert value(metrics, "dspark_fallbacks_total", reason="drafter") == 1
    assert value(metrics, "dspark_fallbacks_total", reason="resync") == 1


def test_two_schedulers_in_a_process_do_not_share_values(metrics: Metrics) -> None:
    MetricsObserver(Metrics("other")).on_step(outcome(), TIMING)
    assert value(metrics, "dspark_batch_tokens_sum") == 0


def test_calibration_is_read_when_metrics_are() -> None:
    metrics = Metrics("m")
    streams = {("greedy", "model"): (PositionScores(100, 0.02, 0.01, 0.1, 0.8),)}
    metrics.watch_calibration(lambda: streams)
    value = metrics.registry.get_sample_value
    labels = {"mode": "greedy", "source": "model", "position": "0"}
    assert value("dspark_calibration_ece", labels) == 0.02
    assert value("dspark_calibration_ece_floor", labels) == 0.01
    assert value("dspark_calibration_brier", labels) == 0.1
    assert value("dspark_calibration_auc", labels) == 0.8
    streams["greedy", "model"] = (PositionScores(200, 0.01, 0.005, 0.1, None),)
    assert value("dspark_calibration_count", labels) == 200
    assert value("dspark_calibration_auc", labels) is None
