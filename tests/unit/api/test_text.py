"""The scheduler reads a checkpoint's text files itself: it must read them as transformers does."""

import json
import shutil
from pathlib import Path

import pytest
from dspark_services.scheduler.api.text import TargetText
from transformers import AutoTokenizer

from dspark.core.errors import InvalidRequestError, TargetError

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Why? <|im_end|>"},
]


@pytest.fixture
def folder(tmp_path: Path, tiny_target_folder: Path) -> Path:
    """A copy of the tiny target's text files, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny_target_folder / name, tmp_path)
    if (tiny_target_folder / "chat_template.jinja").is_file():
        shutil.copy(tiny_target_folder / "chat_template.jinja", tmp_path)
    return tmp_path


def set_template(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)


def test_chat_prompts_equal_those_of_transformers(tiny_target_folder: Path) -> None:
    reference = AutoTokenizer.from_pretrained(tiny_target_folder).apply_chat_template(
        CONVERSATION, add_generation_prompt=True, return_dict=False
    )
    assert list(TargetText.from_folder(tiny_target_folder).encode_chat(CONVERSATION)) == reference


def test_templates_may_use_what_transformers_gives_them(folder: Path) -> None:
    set_template(
        folder,
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ eos_token }}{{ strftime_now('%Y') | length }}",
    )
    text = TargetText.from_folder(folder)
    decoded = text.tokenizer.decode(text.encode_chat(CONVERSATION), skip_special_tokens=False)
    assert decoded == '{"role": "system", "content": "Be brief."}<|im_end|>4'


def test_messages_that_a_template_refuses_are_the_clients_fault(folder: Path) -> None:
    set_template(folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        TargetText.from_folder(folder).encode_chat(CONVERSATION)
    assert caught.value.param == "messages"


def test_a_template_cannot_reach_out_of_its_sandbox(folder: Path) -> None:
    set_template(folder, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        TargetText.from_folder(folder).encode_chat(CONVERSATION)


def test_without_a_template_there_is_no_chat(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        TargetText.from_folder(folder).encode_chat(CONVERSATION)


def test_a_broken_template_stops_the_start(folder: Path) -> None:
    set_template(folder, "{% for %}")
    with pytest.raises(TargetError, match="chat template"):
        TargetText.from_folder(folder)


def test_ending_tokens_come_from_generation_config_and_tokenizer(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    text = TargetText.from_folder(folder)
    assert text.eos_ids == {7, 9, text.tokenizer.token_to_id("<|im_end|>")}


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_an_unusable_tokenizer_is_named(folder: Path, content: str | None) -> None:
    file = folder / "tokenizer.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(TargetError, match=r"tokenizer\.json"):
        TargetText.from_folder(folder)


def test_truncation_left_in_the_tokenizer_is_ignored(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(TargetText.from_folder(folder).encode("longer than that")) == 16
