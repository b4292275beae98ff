import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark.core.errors import PromptError
from dspark.data import Prompt
from dspark.training.cache import Response, cache_responses, read_responses
from dspark.training.regenerate import RegenerateOptions
from dspark.training.shards import ResponseCache
from tests.support.tiny import tiny_target

OPTIONS = RegenerateOptions(
    max_new_tokens=20, max_prompt_tokens=76, batch_size=2, tap_layers=(0, 1), precision="fp32"
)


def test_a_response_is_stored_with_the_targets_own_features(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    cache_responses(
        str(target), [Response(Prompt("a", "chat", "hi"), "hello")], tmp_path / "cached", OPTIONS
    )
    (cached,) = ResponseCache(tmp_path / "cached")
    tokenizer = AutoTokenizer.from_pretrained(target)
    ids = cached.ids.long()
    response = ids[cached.loss_mask == 1]
    assert tokenizer.decode(response) == "hello<|im_end|>"
    assert tokenizer.decode(ids).endswith("hi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>")
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(target).model
        states = model(ids[None], output_hidden_states=True)
    width = states.last_hidden_state.shape[-1]
    first_tap, hidden = states.hidden_states[1][0], states.last_hidden_state[0]
    close = {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(cached.taps[:-1, :width].float(), first_tap[:-1], **close)
    torch.testing.assert_close(cached.hidden[:-1].float(), hidden[:-1], **close)


def test_what_is_there_already_or_too_long_is_skipped(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target")
    short, long = Prompt("a", "chat", "hi"), Prompt("b", "chat", "hi")
    given = [Response(short, "yes"), Response(long, "x" * 100)]
    for _ in range(2):
        cache_responses(str(target), given, tmp_path / "cached", OPTIONS)
    assert [info.id for info in ResponseCache(tmp_path / "cached").infos] == ["a"]


def test_a_bad_record_is_named(tmp_path: Path) -> None:
    file = tmp_path / "responses.jsonl"
    good = {"id": "a", "prompt": "hi", "response": "yes"}
    file.write_text(json.dumps(good) + "\n" + json.dumps({"id": "b"}) + "\n")
    responses = read_responses(file, "chat")
    assert next(responses) == Response(Prompt("a", "chat", "hi"), "yes")
    with pytest.raises(PromptError, match="line 2"):
        next(responses)
