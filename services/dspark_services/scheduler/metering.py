"""Steps into metrics."""

from dspark.engine.events import GateState, StepOutcome
from dspark.ops.metrics import STEP_PARTS, TARGET_PARTS, Metrics
from dspark_services.scheduler.observer import StepTiming


class MetricsObserver:
    """The driver's observer that counts."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._q_gap = 0.0
        self._show_gate(GateState.OFF)

    def on_step(self, outcome: StepOutcome, timing: StepTiming) -> None:
        metrics, stats = self._metrics, outcome.stats
        metrics.count_draft_tokens("proposed", stats.proposed_by_position)
        metrics.count_draft_tokens("admitted", stats.admitted_by_position)
        metrics.count_draft_tokens("accepted", stats.accepted_by_position)
        metrics.count_draft_tokens("trimmed", stats.trimmed_by_position)
        for source, count in stats.proposed_by_source.items():
            metrics.source_tokens["proposed"].labels(source.value).inc(count)
        for source, count in stats.accepted_by_source.items():
            metrics.source_tokens["accepted"].labels(source.value).inc(count)
        metrics.vllm_drafts.inc(next(iter(stats.proposed_by_position), 0))
        metrics.vllm_draft_tokens.inc(stats.proposed)
        metrics.vllm_accepted_tokens.inc(stats.accepted)
        metrics.cap_accept["destroyed"].inc(stats.destroyed)
        metrics.cap_accept["spared"].inc(stats.spared)
        for verified, accepted in zip(stats.verified_lengths, stats.accepted_lengths, strict=True):
            metrics.verified_length.observe(verified)
            metrics.accepted_length.observe(accepted)
        if stats.q_gap > self._q_gap:
            self._q_gap = stats.q_gap
            metrics.q_gap.set(stats.q_gap)
        if stats.predicted_seconds and stats.batch_tokens:
            metrics.cost_error.observe(stats.verify_seconds / stats.predicted_seconds)
        if stats.rows or stats.batch_tokens:  # else it only told the workers what has ended
            self._distribute(stats.batch_tokens, timing)
        for reason, count in (("resync", stats.resynced), ("reopen", stats.reopened)):
            if count:
                metrics.fallbacks.labels(reason).inc(count)
        if stats.gate.state is not self._gate:
            self._show_gate(stats.gate.state)

    def on_fallback(self, reason: str) -> None:
        self._metrics.fallbacks.labels(reason).inc()

    def _distribute(self, batch_tokens: int, timing: StepTiming) -> None:
        metrics = self._metrics
        metrics.batch_tokens.observe(batch_tokens)
        metrics.step_seconds.observe(timing.total)
        for part in STEP_PARTS:
            metrics.step_parts[part].observe(getattr(timing, part))
        for part in TARGET_PARTS:
            metrics.target_parts[part].observe(getattr(timing, part))

    def _show_gate(self, current: GateState) -> None:
        self._gate = current
        for state in GateState:
            self._metrics.gate.labels(state.value).set(state is current)
