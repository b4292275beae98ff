"""Answers over the real application and an engine that the test plays."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from dspark_services.scheduler.api.app import create_app
from dspark_services.scheduler.api.gateway import Gateway
from dspark_services.scheduler.api.text import TargetText

from dspark.core.errors import WorkerUnavailableError
from dspark.engine.request import FinishReason
from dspark.ops.metrics import Metrics
from dspark.ops.settings import Settings
from tests.support.scripted_driver import ScriptedDriver

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def gateway() -> Gateway:
    return Gateway(Settings(served_model_name="tiny", max_body_bytes=1000), Metrics("tiny"))


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(gateway), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        yield client


@pytest.fixture
def driver(gateway: Gateway, tiny_target_folder: Path) -> ScriptedDriver:
    driver = ScriptedDriver()
    gateway.open(driver, TargetText.from_folder(tiny_target_folder))
    return driver


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - nothing announces these conditions
            await asyncio.sleep(0.001)


async def sse(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[httpx.Response, list[str]]:
    response = await client.post("/v1/chat/completions", json=body | {"stream": True})
    text = response.text
    assert text.endswith("\n\n")
    return response, [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]


async def test_a_stream_is_what_openai_sends(
    client: httpx.AsyncClient, driver: ScriptedDriver
) -> None:
    asking = asyncio.create_task(sse(client, CHAT | {"stream_options": {"include_usage": True}}))
    await until(lambda: driver.streams)
    driver.say(0, "a")
    driver.say(0, "")  # held back: may become a stop string
    driver.say(0, "b", FinishReason.STOP)
    response, events = await asking
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]


async def test_without_include_usage_no_chunk_has_the_key(
    client: httpx.AsyncClient, driver: ScriptedDriver
) -> None:
    asking = asyncio.create_task(sse(client, CHAT))
    await until(lambda: driver.streams)
    driver.say(0, "a", FinishReason.LENGTH)
    _, events = await asking
    assert not any("usage" in json.loads(event) for event in events[:-1])


async def test_steps_and_token_ids_are_there_for_those_who_ask(
    client: httpx.AsyncClient, driver: ScriptedDriver
) -> None:
    body = CHAT | {"stream_options": {"dspark_steps": True}, "return_token_ids": True}
    asking = asyncio.create_task(sse(client, body))
    await until(lambda: driver.streams)
    driver.say(0, "")
    driver.say(0, "a", FinishReason.LENGTH)
    _, events = await asking
    chunks = [json.loads(event) for event in events[:-1]]
    step = {"tokens": 1, "admitted": 4, "accepted": 0}
    assert [c["dspark"] for c in chunks if "dspark" in c] == [step, step]
    token_ids = [c["choices"][0].get("token_ids") for c in chunks]
    assert token_ids == [None, [1], [1], None]


async def test_an_error_in_the_middle_is_an_event(
    client: httpx.AsyncClient, driver: ScriptedDriver
) -> None:
    asking = asyncio.create_task(sse(client, CHAT))
    await until(lambda: driver.streams)
    driver.say(0, "a")
    driver.streams[0].push(WorkerUnavailableError("the verifier is gone"))
    _, events = await asking
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["message"] == "the verifier is gone"


async def test_an_error_before_the_answer_is_a_status(
    client: httpx.AsyncClient, driver: ScriptedDriver
) -> None:
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
    await until(lambda: driver.streams)
    driver.streams[0].push(WorkerUnavailableError("the verifier is gone"))
    response = await asking
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0


async def test_a_full_queue_is_503_for_streams_too(
    client: httpx.AsyncClient, driver: ScriptedDriver
) -> None:
    driver.room = 0
    for stream in (False, True):
        response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "overloaded"
        assert "retry-after" in response.headers


async def test_before_the_workers_are_met_only_health_is_good(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()["missing"]) == (503, ["workers"])
    assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503
    assert (await client.get("/status")).status_code == 200


async def test_steps_can_be_held_only_where_the_settings_allow_it(
    client: httpx.AsyncClient, gateway: Gateway
) -> None:
    assert (await client.post("/pause", json={})).status_code == 404
    settings = gateway.settings.model_copy(update={"pausable": True})
    transport = httpx.ASGITransport(create_app(Gateway(settings, gateway.metrics)))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as pausable:
        early = await pausable.post("/pause", json={})
        assert (early.status_code, early.json()["error"]["code"]) == (503, "unavailable")


async def test_ready_says_what_is_there(client: httpx.AsyncClient, driver: ScriptedDriver) -> None:
    assert (await client.get("/ready")).json() == {"status": "ready", "missing": []}


async def test_a_defect_shows_nothing_of_the_inside(
    client: httpx.AsyncClient, driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(driver, "submit", broken)
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal server error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_forgotten_before_the_next_step(
    gateway: Gateway, driver: ScriptedDriver, stream: bool
) -> None:
    leave = asyncio.Event()
    body = json.dumps(CHAT | {"stream": stream}).encode()
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if first:
            return first.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    sent: list[dict[str, Any]] = []
    app: Callable[..., Awaitable[None]] = create_app(gateway)
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip

    async def send(message: Any) -> None:
        sent.append(message)

    serving = asyncio.create_task(app(scope, receive, send))
    await until(lambda: driver.streams)
    driver.say(0, "a")
    if stream:
        await until(lambda: any(b'"a"' in message.get("body", b"") for message in sent))
    assert driver.cancelled == []
    leave.set()  # no further event comes: only the disconnect can end this
    await asyncio.wait_for(serving, 5)
    assert driver.cancelled == [0]
