"""fp32 greedy decoding through all three processes: whatever is drafted, the answers stay plain."""

from pathlib import Path

import pytest

from dspark.bench.exactness import ALWAYS, SPECULATIVE, compare
from dspark.data import load_prompts
from dspark.ops.settings import Settings, load_settings


def check(
    settings: Settings, log_file: Path, *, num_prompts: int, longest: int, max_tokens: int
) -> None:
    """Compare packaged prompts of at most `longest` characters, alone and in company that joins and
    leaves."""
    prompts = [prompt for prompt in load_prompts() if len(prompt.prompt) <= longest][:num_prompts]
    assert len(prompts) == num_prompts
    comparisons = compare(
        settings, prompts, log_file, print, concurrencies=(1, 16), max_tokens=max_tokens
    )
    assert [(c.planner, c.concurrency) for c in comparisons] == [
        (planner, concurrency) for planner in (SPECULATIVE, ALWAYS) for concurrency in (1, 16)
    ]
    for comparison in comparisons:
        assert comparison.exact, comparison
        assert comparison.answers == num_prompts
        if comparison.planner == ALWAYS:  # the other one drafts only where that pays
            assert comparison.accepted > num_prompts


@pytest.mark.parametrize("sources", [[], ["--lookup=false"], ["--drafter=ngram"]])
def test_the_tiny_target_answers_as_without_drafts(
    tiny_settings_argv: list[str], tmp_path: Path, sources: list[str]
) -> None:
    settings = load_settings([*tiny_settings_argv, *sources], {})
    check(settings, tmp_path / "log", num_prompts=24, longest=250, max_tokens=48)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_with_its_packaged_drafter_answers_as_without(tmp_path: Path) -> None:
    settings = load_settings(["--precision=fp32", "--kv-tokens=8192"], {})
    check(settings, tmp_path / "log", num_prompts=8, longest=1000, max_tokens=32)
