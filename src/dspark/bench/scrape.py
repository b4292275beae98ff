"""Differences of a scheduler's metrics over a stretch of load."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dspark.core.errors import WorkerUnavailableError

PATIENCE = 60.0  # seconds for an answer: a machine short of memory may stand still for a while

Samples = dict[tuple[str, str], float]  # (name, value of its one label or "") -> value


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What a scheduler's steps did between two scrapes."""

    steps: float
    step_seconds: float  # of all of them
    tokens: float  # committed
    part_seconds: dict[str, float]  # draft, plan, verify, wire, commit
    batch_tokens: float
    proposed: float
    admitted: float
    accepted: float
    decoding_rows: float  # rows with a verdict on a draft, an empty one included

    @property
    def model_seconds(self) -> float:
        """Inside the two model passes, as the workers timed them."""
        return self.part_seconds["draft"] + self.part_seconds["verify"]

    @property
    def trimmed(self) -> float:
        return self.proposed - self.admitted


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Raises WorkerUnavailableError where the server at `url` is no longer reached."""
    try:
        yield
    except httpx.HTTPError as error:
        raise WorkerUnavailableError(
            f"the server at {url} stopped answering ({error!r}): the services' log may say why"
        ) from error


def scrape(url: str) -> Samples:
    """The scheduler's own metrics. Raises WorkerUnavailableError."""
    with answering(url):
        reply = httpx.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE)
        text = reply.raise_for_status().text
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        if family.name.startswith("dspark_")
        for sample in family.samples
    }


def step_totals(before: Samples, after: Samples) -> StepTotals:
    def rise(name: str, label: str | None = None) -> float:
        return sum(
            value - before.get(key, 0.0)
            for key, value in after.items()
            if key[0] == name and label in (None, key[1])
        )

    def mean(name: str) -> float:
        return rise(f"{name}_sum") / max(rise(f"{name}_count"), 1)

    return StepTotals(
        steps=rise("dspark_step_seconds_count"),
        step_seconds=rise("dspark_step_seconds_sum"),
        tokens=rise("dspark_generated_tokens_total"),
        part_seconds={
            part: rise("dspark_step_part_seconds_sum", part)
            for part in ("draft", "plan", "verify", "wire", "commit")
        },
        batch_tokens=mean("dspark_batch_tokens"),
        proposed=rise("dspark_proposed_tokens_total"),
        admitted=rise("dspark_admitted_tokens_total"),
        accepted=rise("dspark_accepted_tokens_total"),
        decoding_rows=rise("dspark_verified_length_count"),
    )
