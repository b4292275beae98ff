import importlib.util
import json
from pathlib import Path

import pytest

from dspark.core.errors import PromptError
from dspark.data import DOMAINS, Prompt, load_prompts, save_prompts


def _write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_packaged_set_is_large_and_distinct(domain: str) -> None:
    prompts = load_prompts(domain=domain)
    assert len(prompts) >= 48
    assert len({p.prompt for p in prompts}) == len(prompts)
    assert [p.id for p in prompts[:2]] == [f"{domain}-001", f"{domain}-002"]
    assert {p.domain for p in prompts} == {domain}


def test_the_packaged_sets_come_in_turn() -> None:
    assert [p.id for p in load_prompts(limit=4)] == ["math-001", "code-001", "chat-001", "math-002"]


def test_code_prompts_contain_valid_python() -> None:
    for prompt in load_prompts(domain="code"):
        for block in prompt.prompt.split("```python\n")[1:]:
            compile(block.split("```")[0], prompt.id, "exec")


def test_a_file_gives_ids_and_its_stem_as_domain(tmp_path: Path) -> None:
    source = _write(
        tmp_path / "riddles.jsonl",
        '{"prompt": "a"}',
        "",
        '{"id": "x", "domain": "y", "prompt": "b"}',
    )
    assert load_prompts(source) == [Prompt("riddles-1", "riddles", "a"), Prompt("x", "y", "b")]
    assert load_prompts(source, domain="y") == [Prompt("x", "y", "b")]


def test_saved_prompts_load_again(tmp_path: Path) -> None:
    path = tmp_path / "saved.jsonl"
    prompts = load_prompts(limit=5)
    save_prompts(path, [*prompts, Prompt("é", "chat", "line\u2028separator")])
    assert load_prompts(str(path)) == [*prompts, Prompt("é", "chat", "line\u2028separator")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"set\.jsonl, line 2: not JSON"),
        ("[1, 2]", r"set\.jsonl, line 2: expected an object"),
        ('{"text": "a"}', r"set\.jsonl, line 2: 'prompt' must be a string"),
        ('{"prompt": "  "}', r"set\.jsonl, line 2: 'prompt' must be a string"),
        ('{"prompt": "a", "id": 3}', r"set\.jsonl, line 2: 'id' must be a string"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    source = _write(tmp_path / "set.jsonl", '{"prompt": "fine"}', line)
    with pytest.raises(PromptError, match=message):
        load_prompts(source)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"gone\.jsonl: cannot read"):
        load_prompts(str(tmp_path / "gone.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match=r"binary\.jsonl: cannot read"):
        load_prompts(str(tmp_path / "binary.jsonl"))


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no prompts of domain 'poetry'"):
        load_prompts(domain="poetry")
    with pytest.raises(PromptError, match="there are no prompts"):
        load_prompts(_write(tmp_path / "empty.jsonl", ""))


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is there")
def test_a_hub_set_without_the_package_says_what_to_install() -> None:
    with pytest.raises(PromptError, match=r"dspark-serve\[datasets\]"):
        load_prompts("owner/name")


def test_a_hub_set_needs_the_column(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.json").write_text(json.dumps({"question": "a"}), encoding="utf-8")
    with pytest.raises(PromptError, match="no column 'prompt'; it has question"):
        load_prompts(str(tmp_path))
