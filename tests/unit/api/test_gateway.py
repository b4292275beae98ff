"""What bodies become."""

from pathlib import Path
from typing import Any

import pytest
from dspark_services.scheduler.api.gateway import Gateway
from dspark_services.scheduler.api.schema import ChatBody, CompletionBody
from dspark_services.scheduler.api.text import TargetText

from dspark.core.errors import InvalidRequestError
from dspark.ops.metrics import Metrics
from dspark.ops.settings import Settings
from tests.support.scripted_driver import ScriptedDriver

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def driver() -> ScriptedDriver:
    return ScriptedDriver(room=128)


@pytest.fixture
def gateway(driver: ScriptedDriver, tiny_target_folder: Path) -> Gateway:
    gateway = Gateway(Settings(served_model_name="tiny"), Metrics("tiny"))
    gateway.open(driver, TargetText.from_folder(tiny_target_folder))
    return gateway


async def complete(gateway: Gateway, **fields: Any) -> None:
    await gateway.complete(CompletionBody.model_validate(fields))


async def test_choices_are_ordered_by_prompt(gateway: Gateway, driver: ScriptedDriver) -> None:
    await complete(gateway, prompt=["a", [5, 6]], n=2, top_k=-1, stop="x")
    assert [len(request.prompt) for request in driver.requests] == [1, 1, 2, 2]
    assert driver.requests[2].prompt == (5, 6)
    assert {request.sampling.top_k for request in driver.requests} == {0}
    assert {request.stop for request in driver.requests} == {("x",)}
    detokenizers = {id(request.detokenizer) for request in driver.requests}
    assert len(detokenizers) == 4, "detokenizers have state"


async def test_values_that_no_worker_could_compute_with_are_brought_into_range(
    gateway: Gateway, driver: ScriptedDriver
) -> None:
    await complete(gateway, prompt="a", temperature=1e-40, top_k=2**70)
    (request,) = driver.requests
    assert request.sampling.temperature == 0
    assert request.sampling.top_k == driver.target.vocab_size


async def test_every_choice_draws_numbers_of_its_own(
    gateway: Gateway, driver: ScriptedDriver
) -> None:
    await complete(gateway, prompt="a", n=8)
    assert len({request.sampling.nonce for request in driver.requests}) == 8


async def test_without_a_limit_a_completion_has_16_tokens_and_a_chat_all_the_room(
    gateway: Gateway, driver: ScriptedDriver
) -> None:
    await complete(gateway, prompt="abcd")
    await gateway.chat(ChatBody.model_validate(CHAT))
    completion, chat = driver.requests
    assert completion.max_tokens == 16
    assert len(chat.prompt) + chat.max_tokens == driver.target.max_context


async def test_a_chat_without_a_limit_is_cut_at_the_default(
    driver: ScriptedDriver, tiny_target_folder: Path
) -> None:
    settings = Settings(served_model_name="tiny", default_max_tokens=7)
    gateway = Gateway(settings, Metrics("tiny"))
    gateway.open(driver, TargetText.from_folder(tiny_target_folder))
    await gateway.chat(ChatBody.model_validate(CHAT))
    await gateway.chat(ChatBody.model_validate(CHAT | {"max_tokens": 9}))
    assert [request.max_tokens for request in driver.requests] == [7, 9]


async def test_max_completion_tokens_wins(gateway: Gateway, driver: ScriptedDriver) -> None:
    await gateway.chat(ChatBody.model_validate(CHAT | {"max_completion_tokens": 5}))
    await gateway.chat(
        ChatBody.model_validate(CHAT | {"max_completion_tokens": 5, "max_tokens": 9})
    )
    assert [request.max_tokens for request in driver.requests] == [5, 5]


async def test_too_long_an_answer_is_refused_with_both_numbers(gateway: Gateway) -> None:
    with pytest.raises(InvalidRequestError, match=r"4 prompt tokens.*509.*512"):
        await complete(gateway, prompt="abcd", max_tokens=509)
    await complete(gateway, prompt="abcd", max_tokens=508)


async def test_a_call_has_a_largest_number_of_choices(gateway: Gateway) -> None:
    with pytest.raises(InvalidRequestError, match="2 prompts times n = 65"):
        await complete(gateway, prompt=["a", "b"], n=65)


def test_content_parts_and_developer_messages_reach_the_template_as_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = ChatBody.model_validate({"messages": [{"role": "developer", "content": parts}]})
    assert [m.for_template() for m in body.messages] == [{"role": "system", "content": "ab"}]


def test_null_means_the_default() -> None:
    body = CompletionBody.model_validate({"prompt": "a", "max_tokens": None, "logprobs": None})
    assert body.max_tokens == 16
