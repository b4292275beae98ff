import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark.data import Prompt
from dspark.training.generation import BLOCK_SIZE, LoadedTarget
from dspark.training.prompt_queue import PromptQueue, Source
from dspark.training.regenerate import RegenerateOptions, main, regenerate
from dspark.training.shards import CachedSequence, ResponseCache, Split, split_of
from dspark.training.user_turns import is_usable, sample_user_turns
from tests.support.tiny import tiny_target

OPTIONS = RegenerateOptions(
    max_new_tokens=12,
    max_prompt_tokens=84,
    batch_size=3,
    tap_layers=(0, 1),
    precision="fp32",
    per_shard=2,
)
PROMPTS = [Prompt(f"p{i}", "math", "count to " + "x" * i) for i in range(7)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("tiny") / "target")


def by_id(folder: Path) -> dict[str, CachedSequence]:
    return {sequence.info.id: sequence for sequence in ResponseCache(folder)}


def test_greedy_answers_are_those_of_transformers(target: Path, tmp_path: Path) -> None:
    regenerate(str(target), [Source("math", PROMPTS)], tmp_path, OPTIONS)
    answers = by_id(tmp_path)
    assert set(answers) == {prompt.id for prompt in PROMPTS}
    model = AutoModelForCausalLM.from_pretrained(target)
    greedy = [a for a in answers.values() if a.info.temperature == 0]
    assert 0 < len(greedy) < len(answers)
    for answer in greedy:
        prompt = answer.ids[answer.loss_mask == 0][None].long()
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
        assert answer.ids.tolist() == expected[0].tolist()
        assert answer.info.finish == ("stop" if len(answer.ids) < len(prompt[0]) + 12 else "length")


def test_only_held_out_prompts_and_at_the_temperatures_asked_for(
    target: Path, tmp_path: Path
) -> None:
    prompts = [{"id": f"p{i}", "domain": "math", "prompt": f"count {i}"} for i in range(300)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    out = str(tmp_path / "out")
    main(
        f"--target {target} --out {out} --source math {file} 1000000 --held-out-only "
        "--temperatures 1 --max-new-tokens 4 --tap-layers 0 1 --precision fp32".split()
    )
    answers = by_id(Path(out))
    assert {*answers} == {p["id"] for p in prompts if split_of(p["id"]) is Split.HELD_OUT}
    assert {answer.info.temperature for answer in answers.values()} == {1.0}


def test_features_are_those_of_one_plain_forward(target: Path, tmp_path: Path) -> None:
    regenerate(str(target), [Source("math", PROMPTS)], tmp_path, OPTIONS)
    model = AutoModelForCausalLM.from_pretrained(target).model
    for answer in ResponseCache(tmp_path):
        with torch.no_grad():
            states = model(answer.ids[None].long(), output_hidden_states=True)
        hidden = states.last_hidden_state[0].bfloat16()
        torch.testing.assert_close(answer.hidden[:-1], hidden[:-1], atol=1e-2, rtol=1e-2)
        tap = states.hidden_states[1][0].bfloat16()  # [0] is the embedding
        torch.testing.assert_close(answer.taps[:-1, : tap.shape[1]], tap[:-1], atol=1e-2, rtol=1e-2)
        assert not answer.hidden[-1].any()
        assert not answer.taps[-1].any()


def test_batch_mates_and_restarts_change_nothing(target: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    regenerate(str(target), [Source("math", PROMPTS)], whole, OPTIONS)
    regenerate(str(target), [Source("math", PROMPTS[:3])], parts, OPTIONS)
    regenerate(str(target), [Source("math", PROMPTS[::-1])], parts, OPTIONS)
    left, right = by_id(whole), by_id(parts)
    assert {i: a.ids.tolist() for i, a in left.items()} == {
        i: a.ids.tolist() for i, a in right.items()
    }
    assert len(ResponseCache(parts)) == len(PROMPTS)  # nothing was done twice


def test_too_long_prompts_are_skipped(target: Path, tmp_path: Path) -> None:
    prompts = [Prompt("long", "math", "x" * 200), *PROMPTS[:1]]
    regenerate(str(target), [Source("math", prompts)], tmp_path, OPTIONS)
    assert set(by_id(tmp_path)) == {"p0"}


def test_workers_share_the_prompts() -> None:
    def ids(worker: tuple[int, int]) -> Iterator[str]:
        queue = PromptQueue([Source("math", PROMPTS)], {}, 10, worker)
        return (prompt.id for _, prompt in queue)

    shares = [set(ids((index, 3))) for index in range(3)]
    assert set().union(*shares) == {prompt.id for prompt in PROMPTS}
    assert sum(map(len, shares)) == len(PROMPTS)


def test_domains_advance_together_until_their_budgets() -> None:
    sources = [
        Source(name, [Prompt(f"{name}{i}", name, "?") for i in range(100)], budget)
        for name, budget in (("math", 300), ("code", 100))
    ]
    queue = PromptQueue(sources, {"math0": 60}, 10)
    order = []
    for domain, _ in queue:
        order.append(domain)
        queue.finish(domain, 20)
    assert order.count("math") == (300 - 60) / 20
    assert order.count("code") == 100 / 20
    assert order[0] == "code"  # math had a start
    assert "code" in order[-4:]


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("How do I bake bread at home?", True),
        ("Hi", False),
        ("x" * 401, False),
        ("This one just stops in the middle,", False),
        ("Как приготовить хлеб дома сегодня?", False),
        ("Write a poem.\nWrite a poem.", False),
    ],
)
def test_usable_turns(text: str, usable: bool) -> None:
    assert is_usable(text) is usable


def test_user_turns_start_where_the_users_words_would(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.training.user_turns.is_usable", bool)
    turns = list(sample_user_turns(str(target), 3, batch_size=2, precision="fp32"))
    assert len({turn.prompt for turn in turns}) == 3
    assert all(turn.domain == "chat" for turn in turns)


def test_user_turns_go_on_behind_the_known_ones(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.training.user_turns.is_usable", bool)
    known = [Prompt("turn-0-00000", "chat", "a"), Prompt("turn-0-00007", "chat", "b")]
    sampled = sample_user_turns(str(target), 4, batch_size=2, precision="fp32", known=known)
    ids = [turn.id for turn in sampled]
    assert len(ids) == 2
    assert min(ids) >= "turn-0-00008"


def test_chat_ids_end_at_the_assistants_turn(target: Path) -> None:
    loaded = LoadedTarget(target, "fp32", (), BLOCK_SIZE)
    text = loaded.tokenizer.decode(loaded.chat_ids("hi"))
    assert text.endswith("hi<|im_end|>\n<|im_start|>assistant\n")
