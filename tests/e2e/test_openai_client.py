"""OpenAI's own client against a server process that runs the tiny models."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from io import StringIO
from typing import Any

import httpx
import openai
import pytest
from rich.console import Console

from dspark.bench.scrape import scrape
from dspark.bench.system import running_system
from dspark.cli.generate import show
from dspark.ops.settings import load_settings

PLANNER = "fixed:3"  # drafts whatever it costs: a tiny target is too fast for drafts to pay
PROMPT = "Hello, my name is"
MESSAGES: Any = [{"role": "user", "content": "Tell me something."}]


@pytest.fixture(scope="module")
def url(tiny_settings_argv: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = load_settings([*tiny_settings_argv, "--transport=inproc", "--max-body-bytes=50000"])
    log = tmp_path_factory.mktemp("log") / "server.log"
    with running_system(settings, (PLANNER,), log) as urls:
        yield urls[PLANNER]


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    """For what the official client cannot send."""
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=url, trust_env=False, headers=headers, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False) as transport,
        openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport
        ) as client,
    ):
        yield client


def complete(client: openai.OpenAI, **fields: Any) -> openai.types.Completion:
    arguments = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0} | fields
    completion = client.completions.create(**arguments)
    assert isinstance(completion, openai.types.Completion)
    return completion


def text(client: openai.OpenAI, **fields: Any) -> str:
    return complete(client, **fields).choices[0].text


# --- Answers ----------------------------------------------------------------------------------


def test_a_completion_has_its_shape(client: openai.OpenAI) -> None:
    completion = complete(client)
    assert completion.object == "text_completion"
    assert completion.model == "tiny"
    assert completion.choices[0].finish_reason == "length"
    usage = completion.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 24)
    assert usage.total_tokens == len(PROMPT) + 24


def test_speculation_is_in_the_usage(client: openai.OpenAI) -> None:
    dspark = complete(client, prompt="Something else").usage.dspark  # type: ignore[union-attr]
    assert dspark["proposed"] >= dspark["admitted"] >= dspark["accepted"] > 0
    assert dspark["steps"] + dspark["accepted"] == 24


def test_a_chat_answer_has_its_shape(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=10, temperature=0
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


def test_streams_say_what_whole_answers_say(client: openai.OpenAI) -> None:
    streamed = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == text(client)

    arguments: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


def test_a_prompt_may_be_token_ids(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=6, extra_body={"return_token_ids": True})
    token_ids = answer.choices[0].token_ids  # type: ignore[attr-defined]
    assert len(token_ids) == 6
    forms = complete(client, prompt=[token_ids, token_ids]).choices
    assert forms[0].text == forms[1].text == text(client, prompt=token_ids)


def test_choices_of_several_prompts_come_in_order(client: openai.OpenAI) -> None:
    prompts = ["first", "second prompt"]
    completion = complete(client, prompt=prompts, n=2, max_tokens=8)
    alone = [complete(client, prompt=prompt, max_tokens=8) for prompt in prompts]
    first, second = (answer.choices[0].text for answer in alone)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert [c.text for c in completion.choices] == [first, first, second, second]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == sum(map(len, prompts))
    one_each = sum(answer.usage.completion_tokens for answer in alone)  # type: ignore[union-attr]
    assert completion.usage.completion_tokens == 2 * one_each


def test_samples_differ(client: openai.OpenAI) -> None:
    choices = complete(client, n=4, temperature=1.0).choices
    assert len({choice.text for choice in choices}) > 1


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_an_answer_has_exactly_max_tokens(client: openai.OpenAI, max_tokens: int) -> None:
    usage = complete(client, max_tokens=max_tokens).usage
    assert usage is not None
    assert usage.completion_tokens == max_tokens


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    full = text(client)
    stop = full[9:12]
    expected = full[: full.index(stop)]
    whole = complete(client, stop=["never there", stop])
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
    assert whole.usage is not None
    assert whole.usage.completion_tokens < 24
    streamed = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, stop=stop, stream=True
    )
    chunks = list(streamed)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_seed_is_fine_without_sampling(client: openai.OpenAI) -> None:
    assert text(client, seed=7) == text(client)


# --- Refusals ---------------------------------------------------------------------------------

REFUSED = {
    "temperature NaN": '"temperature": NaN',
    "temperature infinite": '"temperature": Infinity',
    "temperature too large for a float": '"temperature": 1e999',
    "temperature negative": '"temperature": -0.1',
    "temperature above 2": '"temperature": 2.1',
    "temperature text": '"temperature": "1"',
    "temperature bool": '"temperature": true',
    "top_p 0": '"top_p": 0',
    "top_p above 1": '"top_p": 1.01',
    "top_p NaN": '"top_p": NaN',
    "top_k -2": '"top_k": -2',
    "top_k fraction": '"top_k": 1.5',
    "max_tokens 0": '"max_tokens": 0',
    "max_tokens negative": '"max_tokens": -1',
    "max_tokens text": '"max_tokens": "9"',
    "max_tokens beyond the context": '"max_tokens": 511',
    "n 0": '"n": 0',
    "n too large": '"n": 129',
    "empty stop": '"stop": ""',
    "empty stop in a list": '"stop": ["a", ""]',
    "too many stops": '"stop": ["a", "b", "c", "d", "e"]',
    "stop number": '"stop": 5',
    "seed with sampling": '"seed": 1, "temperature": 0.5',
    "seed beyond 64 bits": '"seed": 9223372036854775808, "temperature": 0',
    "stream text": '"stream": "yes"',
    "stream_options without stream": '"stream_options": {"include_usage": true}',
    "continuous usage": '"stream": true, "stream_options": {"continuous_usage_stats": true}',
    "prompt empty": '"prompt": ""',
    "prompt empty list": '"prompt": []',
    "prompt empty ids": '"prompt": [[]]',
    "prompt list with an empty text": '"prompt": ["a", ""]',
    "prompt null": '"prompt": null',
    "prompt number": '"prompt": 5',
    "prompt mixed": '"prompt": [1, "a"]',
    "prompt bools": '"prompt": [true]',
    "prompt token beyond the vocabulary": '"prompt": [264]',
    "prompt token negative": '"prompt": [-1]',
    "prompt fills the context": f'"prompt": "{"a" * 512}"',
    "prompt with half a character": r'"prompt": "\ud800"',
    "logprobs": '"logprobs": 0',
    "penalty": '"presence_penalty": 0.5',
    "logit_bias": '"logit_bias": {"5": 1}',
    "min_p": '"min_p": 0.1',
    "echo": '"echo": true',
    "suffix": '"suffix": "end"',
    "best_of": '"best_of": 2',
    "response_format": '"response_format": {"type": "json_object"}',
}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, strictly parsed: a NaN in it would break clients."""
    parsed = json.loads(response.content, parse_constant=pytest.fail)
    assert parsed.keys() == {"error"}
    assert parsed["error"].keys() == {"message", "type", "param", "code"}
    assert parsed["error"]["message"]
    return dict(parsed["error"])


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_field_is_named(http: httpx.Client, fields: str) -> None:
    # Of a key that is there twice, JSON readers take the last.
    body = f'{{"model": "tiny", "prompt": "hi", {fields}}}'
    response = http.post("/v1/completions", content=body)
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    field = fields.rsplit('": ', 1)[0] if fields.count('": ') == 1 else ""
    assert field.strip('"') in (error["param"] or "")


@pytest.mark.parametrize(
    "fields",
    [
        '"messages": []',
        '"messages": "hi"',
        '"messages": [{"role": "tool", "content": "hi"}]',
        '"messages": [{"role": "user"}]',
        '"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]',
        '"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 0',
        '"messages": [{"role": "user", "content": "a"}], "logprobs": true',
        '"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]',
        '"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}',
    ],
)
def test_bad_chats_are_refused(http: httpx.Client, fields: str) -> None:
    response = http.post("/v1/chat/completions", content=f"{{{fields}}}")
    assert response.status_code == 400
    assert error_of(response)["param"]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ("{not json", {}, 400),
        ("[]", {}, 400),
        ("", {}, 400),
        ("[" * 40_000, {}, 400),
        ("{}", {"content-type": "text/plain"}, 415),
        (b" " * 50_001, {}, 413),
    ],
    ids=["no json", "no object", "nothing", "too deep", "wrong type", "too large"],
)
def test_bad_bodies_are_refused(
    http: httpx.Client, body: str | bytes, headers: dict[str, str], status: int
) -> None:
    response = http.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == status
    error_of(response)


def test_a_body_that_hides_its_length_is_limited_too(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=iter([b" " * 10_000] * 6))
    assert response.status_code == 413


def test_unknown_models_paths_and_methods(http: httpx.Client, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, model="gpt-4")
    assert caught.value.code == "model_not_found"
    missing = http.get("/v1/nothing")
    assert missing.status_code == 404
    error_of(missing)
    wrong = http.get("/v1/completions")
    assert wrong.status_code == 405
    error_of(wrong)


def test_what_asks_for_nothing_and_what_nobody_knows_is_allowed(client: openai.OpenAI) -> None:
    plain = text(client)
    neutral = {"presence_penalty": 0, "logit_bias": {}, "echo": False, "best_of": 1}
    assert text(client, **neutral, extra_body={"next_years_field": [1], "top_k": 0}) == plain


def test_extreme_sampling_values_harm_nobody(client: openai.OpenAI) -> None:
    assert text(client, temperature=1e-40) == text(client, temperature=0)
    assert text(client, temperature=1e-5, extra_body={"top_k": 2**40})


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


# --- Load -------------------------------------------------------------------------------------


async def test_bad_requests_do_not_disturb_a_good_one(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    quiet = await asyncio.to_thread(text, client, max_tokens=200)
    good = asyncio.create_task(asyncio.to_thread(text, client, max_tokens=200))
    statuses = set()
    for fields in [*REFUSED.values()][::4]:
        body = f'{{"prompt": "hi", {fields}}}'
        response = await asyncio.to_thread(http.post, "/v1/completions", content=body)
        statuses.add(response.status_code)
    assert statuses == {400}
    assert await good == quiet


def finished(url: str, reason: str) -> float:
    return scrape(url).get(("dspark_requests_finished_total", reason), 0.0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_sequence(url: str, stream: bool) -> None:
    aborted = finished(url, "abort")
    steps = scrape(url)["dspark_step_seconds_count", ""]
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 490, "temperature": 0, "stream": stream})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        deadline = time.monotonic() + 20
        while scrape(url)["dspark_requests_running", ""] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
    deadline = time.monotonic() + 20
    while finished(url, "abort") == aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert finished(url, "abort") == aborted + 1
    samples = scrape(url)
    assert samples["dspark_requests_running", ""] == 0
    # 490 tokens take at least 123 steps: it ended because the client had left.
    assert samples["dspark_step_seconds_count", ""] - steps < 100


def test_metrics_are_plain_text_without_a_redirect(http: httpx.Client) -> None:
    response = http.get("/metrics", follow_redirects=False)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:spec_decode_num_accepted_tokens_total" in response.text


def test_status_names_planner_gate_and_cost(http: httpx.Client) -> None:
    status = http.get("/status").json()
    assert status["cost"]["tokens"]["seconds"]
    assert status["planner"] == PLANNER
    assert status["driver"]["gate"]["state"] in ("trimming", "verify-all")
    assert status["driver"]["gate"]["reason"]


def test_an_answer_can_be_watched_step_by_step(url: str) -> None:
    output = StringIO()
    show(Console(file=output), url, "Tell me something.", max_tokens=24, temperature=0.0)
    printed = output.getvalue()
    assert "24 tokens in" in printed
    assert "accepted/admitted, step by step: 0/0 " in printed
