import random
import re
from collections import Counter

import pytest

from dspark.core.errors import PromptError
from dspark.data import Prompt, load_prompts
from dspark.training.prompts import chat_prompts, code_prompts, content_hash, exclude, hashes
from dspark.training.templates import from_template


@pytest.fixture(scope="module")
def code() -> list[Prompt]:
    return code_prompts(1500, seed=1)


def test_code_prompts_are_distinct(code: list[Prompt]) -> None:
    assert len(hashes(code)) == len({p.id for p in code}) == 1500


def test_code_prompts_are_varied(code: list[Prompt]) -> None:
    first_lines = Counter(p.prompt.splitlines()[0] for p in code if "```" not in p.prompt)
    assert len(first_lines) > 300
    assert 0.25 < sum('"""' in p.prompt for p in code) / len(code) < 0.6
    assert 0.08 < sum("\nassert " in p.prompt for p in code) / len(code) < 0.3


@pytest.mark.parametrize("generate", [code_prompts, chat_prompts])
def test_the_seed_alone_decides(generate) -> None:
    assert generate(50, seed=3) == generate(50, seed=3)
    assert generate(50, seed=3) != generate(50, seed=4)
    assert generate(50, seed=3)[:20] == generate(20, seed=3)


def test_chat_prompts_are_distinct_and_filled() -> None:
    prompts = chat_prompts(600, seed=1)
    assert len(hashes(prompts)) == 600
    assert not any(re.search(r"[{}]", p.prompt) for p in prompts)


def test_exhausted_templates_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.training.prompts.from_template", lambda name, rng: "the only one")
    with pytest.raises(PromptError, match="chat templates give only 1 prompts, not 2"):
        chat_prompts(2, seed=0)


def test_two_uses_of_a_slot_differ() -> None:
    rng = random.Random(0)
    texts = [from_template("chat", rng) for _ in range(3000)]
    dialogues = [
        match
        for t in texts
        if (match := re.fullmatch(r"Write a dialogue between (.*) and (.*) about .*", t))
    ]
    assert len(dialogues) > 20
    assert all(match[1] != match[2] for match in dialogues)


def test_content_hash_ignores_case_spacing_and_punctuation() -> None:
    assert content_hash("Write  a function,\nplease!") == content_hash("write a function please")
    assert content_hash("count to 10") != content_hash("count to 11")


def test_exclude_drops_exactly_the_evaluation_prompts(code: list[Prompt]) -> None:
    held_out = hashes(
        Prompt("x", "code", p.prompt.upper() if "```" not in p.prompt else p.prompt)
        for p in code[:7]
    )
    assert exclude(code, held_out) == code[7:]


def test_excluded_prompts_are_not_generated(code: list[Prompt]) -> None:
    held_out = hashes(code[:10])
    again = code_prompts(100, seed=1, excluded=held_out)
    assert not held_out & hashes(again)
    assert [p.prompt for p in again[:20]] == [p.prompt for p in code[10:30]]


def test_packaged_prompts_never_enter_training(
    code: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hashes(code) & hashes(load_prompts())
    packaged = [Prompt("own", "code", code[0].prompt)]
    monkeypatch.setattr("dspark.training.prompts.load_prompts", lambda: packaged)
    assert code[0].prompt not in {p.prompt for p in code_prompts(50, seed=1)}
