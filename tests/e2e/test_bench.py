"""The serving bench on the tiny models, through real processes: do its figures add up?"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspark.bench import law
from dspark.bench.serving import ServeOptions, Summary, run
from dspark.bench.table import table_scores
from dspark.core.errors import ConfigError
from dspark.data import load_prompts
from dspark.ops.settings import load_settings
from dspark.training.shards import CachedSequence, SequenceInfo, ShardWriter


@pytest.mark.timeout(600)
def test_a_run_over_both_transports(tiny_settings_argv: list[str], tmp_path: Path) -> None:
    settings = load_settings(tiny_settings_argv, {})
    prompts = [prompt for prompt in load_prompts() if len(prompt.prompt) <= 200]
    planners = ("none", "fixed:2", "fixed:2@ngram")
    options = ServeOptions(
        transports=("grpc", "inproc"),
        concurrencies=(2,),
        planners=planners,
        rounds=4,
        turn_seconds=0.5,
        max_tokens=16,
    )
    kept: list[list[Summary]] = []
    summaries, plain = run(
        settings, prompts, options, tmp_path / "log", print, lambda found: kept.append([*found])
    )
    assert kept == [summaries[:3], summaries]
    assert [(s.transport, s.planner) for s in summaries] == [
        (transport, planner) for transport in options.transports for planner in planners
    ]
    assert all(0 < len(answer.token_ids) <= 16 for answer in plain)
    assert {answer.prompt.id for answer in plain} <= {prompt.id for prompt in prompts}
    for summary in summaries:
        drafting = summary.planner == "fixed:2"
        assert summary.ratio == 1.0 or summary.planner != "none"
        assert 0 < summary.overhead < 1
        if summary.planner == "fixed:2@ngram":  # finds something to look up only sometimes
            assert 1 < summary.accepted_length < summary.verified_length < 2
        else:
            assert (summary.accepted_length > 1) == drafting
            assert summary.accepted_length <= summary.verified_length <= 1 + 2 * drafting
            assert (summary.verified_length > 2) == drafting
        # Almost every step has an anchor and, where drafts are made, two more rows for each client.
        assert summary.batch_tokens > 2 * drafting
        # Only the turns count, and in these two clients shared the tokens.
        assert 4 * 0.5 <= summary.tokens / summary.throughput < 4 * 1.0
        assert summary.slow_user_rate <= summary.user_rate

    # A table that was counted on these very answers predicts most of them.
    writer = ShardWriter(tmp_path / "responses")
    for answer in plain:
        ids = torch.tensor(answer.token_ids, dtype=torch.int32)
        empty = torch.empty(len(ids), 0, dtype=torch.bfloat16)
        info = SequenceInfo(answer.prompt.id, answer.prompt.domain, 0.0, "train", "length")
        ones = torch.ones(len(ids), dtype=torch.uint8)
        writer.add(CachedSequence(info, ids, ones, empty, empty, torch.zeros(len(ids))))
    writer.flush()
    scores = table_scores(settings, tmp_path / "responses", plain)
    assert set(scores) == {*summaries[0].by_domain, "all"}
    assert scores["all"].accepted_length > 2


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of grpc, inproc, not 'pigeon'"):
        ServeOptions(transports=("pigeon",))  # type: ignore[arg-type]


@pytest.mark.timeout(600)
def test_sampled_answers_follow_the_enumerated_law(
    tiny_settings_argv: list[str], tmp_path: Path
) -> None:
    settings = load_settings([*tiny_settings_argv, "--precision=fp32"], {})
    drawn = law.draw(settings, "hello", 800, tmp_path / "log", print)
    assert [own.planner for own in drawn] == list(law.PLANNERS)
    assert drawn[-1].accepted > 100
    exact = law.exact_law(settings, "hello")
    assert all(own.p_value(exact) > law.SIGNIFICANCE for own in drawn)
    warmer = law.exact_law(settings, "hello", replace(law.SAMPLING, temperature=2.0))
    assert all(own.p_value(warmer) < law.SIGNIFICANCE for own in drawn)
