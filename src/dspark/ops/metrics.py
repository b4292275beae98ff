"""Every metric the scheduler exports, named once.

Counters by `position` have one series for each place in a draft block; their sum is the total.
The four draft counters are never merged: proposed = admitted + trimmed, and accepted is part of
admitted. Names that start with `vllm:` repeat what tools written for vLLM look for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from dspark.core.reliability import PositionScores

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
DRAFT_STAGES = ("proposed", "admitted", "accepted", "trimmed")
STEP_PARTS = ("draft", "plan", "verify", "wire", "commit")
TARGET_PARTS = ("backbone", "head")

_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_STEP_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 3, 10)
_RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 4)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_REQUEST_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_CAP_ACCEPT = {
    "destroyed": "Accepted draft tokens that would have been trimmed, on the rows verified whole",
    "spared": "Rejected draft tokens that would have been trimmed, on the rows verified whole",
}

_CALIBRATION = {
    "count": "Recent verified blocks that reached the position: what the others are measured on",
    "ece": "Expected calibration error of the survival through a position, 20 bins",
    "ece_floor": "The same as a perfect model would show at this count",
    "brier": "Mean squared error of the survival through a position",
    "auc": "Chance that the survival ranks an accepted position above a rejected one",
}

ReadCalibration = Callable[[], Mapping[tuple[str, str], Sequence[PositionScores]]]
"""By verification mode and source of the drafts, entry j for block position j."""

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


class Metrics:
    """A registry of its own, so that several schedulers may live in one process (tests do)."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.registry = CollectorRegistry()

        self.draft_tokens = {
            stage: Counter(
                f"dspark_{stage}_tokens", f"Draft tokens {stage}, by position in the block",
                ["position"], registry=self.registry,
            )
            for stage in DRAFT_STAGES
        }  # fmt: skip
        self.source_tokens = {
            stage: Counter(
                f"dspark_source_{stage}_tokens", f"Draft tokens {stage}, by what drafted them",
                ["source"], registry=self.registry,
            )
            for stage in ("proposed", "accepted")
        }  # fmt: skip
        self.accepted_length = self._histogram(
            "dspark_accepted_length",
            "Tokens a decoding row committed in a step: accepted ones and the target's own",
            _LENGTHS,
        )
        self.verified_length = self._histogram(
            "dspark_verified_length", "Tokens the target processed for a decoding row", _LENGTHS
        )
        self.cap_accept = {
            outcome: Counter(f"dspark_cap_accept_{outcome}_tokens", meaning, registry=self.registry)
            for outcome, meaning in _CAP_ACCEPT.items()
        }
        self.q_gap = self._gauge(
            "dspark_q_gap_max", "Largest |q as drafted - q as rebuilt| since the start"
        )

        self.step_seconds = self._histogram(
            "dspark_step_seconds", "Wall seconds of a step", _STEP_SECONDS
        )
        self.step_parts = self._labelled_histogram(
            "dspark_step_part_seconds", "Seconds of a step by part", STEP_PARTS
        )
        self.target_parts = self._labelled_histogram(
            "dspark_target_part_seconds", "Seconds of the verify part by what ran", TARGET_PARTS
        )
        self.batch_tokens = self._histogram(
            "dspark_batch_tokens", "Rows the target processed in a step", _TOKENS
        )
        self.cost_error = self._histogram(
            "dspark_target_seconds_over_expected",
            "Seconds of a target step over what the cost surface expected",
            _RATIOS,
        )
        self.gate = Gauge(
            "dspark_gate_state", "1 for the state the draft gate is in", ["state"],
            registry=self.registry,
        )  # fmt: skip
        self.fallbacks = Counter(
            "dspark_fallbacks", "Times a step went on without a worker's answer", ["reason"],
            registry=self.registry,
        )  # fmt: skip

        self.running = self._gauge("dspark_requests_running", "Sequences being decoded")
        self.waiting = self._gauge("dspark_requests_waiting", "Sequences in the queue")
        self.finished = Counter(
            "dspark_requests_finished", "Sequences that ended, by reason", ["reason"],
            registry=self.registry,
        )  # fmt: skip
        self.prompt_tokens = self._counter("dspark_prompt_tokens", "Prompt tokens of sequences")
        self.cached_tokens = self._counter(
            "dspark_cached_prompt_tokens", "Prompt tokens that came from the prefix cache"
        )
        self.generated_tokens = self._counter("dspark_generated_tokens", "Tokens committed")
        self.time_to_first_token = self._histogram(
            "dspark_time_to_first_token_seconds",
            "From submission to the first token",
            _REQUEST_SECONDS,
        )
        self.inter_token_latency = self._histogram(
            "dspark_inter_token_latency_seconds",
            "Seconds between two deliveries of a sequence, divided by the tokens of the second",
            _TOKEN_SECONDS,
        )
        self.request_seconds = self._histogram(
            "dspark_request_seconds", "From submission to the end of a sequence", _REQUEST_SECONDS
        )

        self.vllm_drafts = self._alias(Counter, "spec_decode_num_drafts", "Blocks drafted")
        self.vllm_draft_tokens = self._alias(
            Counter, "spec_decode_num_draft_tokens", "Draft tokens, trimmed ones included"
        )
        self.vllm_accepted_tokens = self._alias(
            Counter, "spec_decode_num_accepted_tokens", "Draft tokens accepted"
        )
        self._vllm_accepted_per_pos = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position",
            ["model_name", "position"], registry=self.registry,
        )  # fmt: skip
        self.vllm_running = self._alias(Gauge, "num_requests_running", "Sequences being decoded")
        self.vllm_waiting = self._alias(Gauge, "num_requests_waiting", "Sequences in the queue")

    def count_draft_tokens(self, stage: str, by_position: Iterable[int]) -> None:
        """Add one step's counts, entry j for block position j, to a stage of DRAFT_STAGES."""
        for position, count in enumerate(by_position):
            if count:
                self.draft_tokens[stage].labels(position).inc(count)
                if stage == "accepted":
                    self._vllm_accepted_per_pos.labels(self._model_name, position).inc(count)

    def watch_calibration(self, read: ReadCalibration) -> None:
        """Export how well confidences predict, read when metrics are."""
        self.registry.register(_CalibrationCollector(read))

    def render(self) -> bytes:
        """The text exposition of everything, in the format of CONTENT_TYPE."""
        return generate_latest(self.registry)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, registry=self.registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, meaning, buckets=tuple(buckets), registry=self.registry)

    def _labelled_histogram(
        self, name: str, meaning: str, parts: Iterable[str]
    ) -> dict[str, Histogram]:
        histogram = Histogram(
            name, meaning, ["part"], buckets=_STEP_SECONDS, registry=self.registry
        )
        return {part: histogram.labels(part) for part in parts}

    def _alias(self, kind: type[Metric], name: str, meaning: str) -> Metric:
        metric = kind(f"vllm:{name}", meaning, ["model_name"], registry=self.registry)
        return metric.labels(self._model_name)


class _CalibrationCollector(Collector):
    def __init__(self, read: ReadCalibration) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = {
            name: GaugeMetricFamily(
                f"dspark_calibration_{name}", meaning, labels=["mode", "source", "position"]
            )
            for name, meaning in _CALIBRATION.items()
        }
        for (mode, source), positions in self._read().items():
            for position, scores in enumerate(positions):
                for name, family in families.items():
                    value = getattr(scores, name)
                    if value is not None:
                        family.add_metric([mode, source, str(position)], value)
        return families.values()
