"""Generations over the driver's own event streams, fed by hand."""

import pytest
from dspark_services.scheduler.api.detokenizer import IncrementalDetokenizer
from dspark_services.scheduler.api.generation import Generation, total_usage
from tokenizers import Tokenizer

from dspark.core.errors import OverloadedError, WorkerUnavailableError
from dspark.engine.request import FinishReason, Request
from dspark.ops.metrics import Metrics
from tests.support.scripted_driver import USAGE, ScriptedDriver
from tests.support.tiny import byte_tokenizer

TOKENIZER: Tokenizer = byte_tokenizer().backend_tokenizer


@pytest.fixture
def driver() -> ScriptedDriver:
    return ScriptedDriver()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("toy")


def start(driver: ScriptedDriver, metrics: Metrics, count: int) -> Generation:
    request = Request((1, 2, 3), 5, IncrementalDetokenizer(TOKENIZER))
    return Generation(driver, metrics, [request] * count, n=1)


def finished(metrics: Metrics, reason: str) -> float | None:
    return metrics.registry.get_sample_value("dspark_requests_finished_total", {"reason": reason})


async def test_events_of_several_choices_come_as_they_happen(
    driver: ScriptedDriver, metrics: Metrics
) -> None:
    with start(driver, metrics, 2) as generation:
        events = generation.events()
        driver.say(1, "a")
        assert [(i, e.text) for i, e in [await anext(events)]] == [(1, "a")]
        driver.say(0, "b", FinishReason.LENGTH)
        driver.say(1, "c", FinishReason.STOP)
        rest = [(index, event.text) async for index, event in events]
    assert sorted(rest) == [(0, "b"), (1, "c")]
    assert driver.cancelled == []
    assert (finished(metrics, "length"), finished(metrics, "stop")) == (1, 1)


async def test_leaving_cancels_what_has_not_ended(driver: ScriptedDriver, metrics: Metrics) -> None:
    with start(driver, metrics, 3) as generation:
        driver.say(1, "a", FinishReason.STOP)
        events = generation.events()
        await anext(events)
        await events.aclose()
    assert driver.cancelled == [0, 2]
    assert finished(metrics, "abort") == 2


def test_all_requests_are_queued_or_none(metrics: Metrics) -> None:
    driver = ScriptedDriver(room=2)
    with pytest.raises(OverloadedError):
        start(driver, metrics, 3)
    assert driver.cancelled == [0, 1]


@pytest.mark.parametrize("count", [1, 3])
async def test_an_error_ends_every_choice(
    driver: ScriptedDriver, metrics: Metrics, count: int
) -> None:
    with start(driver, metrics, count) as generation:
        for stream in driver.streams:
            stream.push(WorkerUnavailableError("gone"))
        with pytest.raises(WorkerUnavailableError):
            await anext(generation.events())
    assert finished(metrics, "error") == count
    assert finished(metrics, "abort") is None


def test_usage_counts_a_prompt_once_for_all_its_choices() -> None:
    assert total_usage([USAGE] * 6, n=3) == {
        "prompt_tokens": 6,
        "completion_tokens": 12,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 2},
        "dspark": {"steps": 12, "proposed": 30, "admitted": 24, "accepted": 6},
    }
