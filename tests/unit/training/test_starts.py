from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark.core.errors import ConfigError
from dspark.modeling.drafters.config import DrafterConfig
from dspark.training import starts
from tests.support.tiny import tiny_target

V = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), vocab_size=V, num_layers=4)


def drafter(
    target: Path,
    taps: tuple[int, ...] = (0, 1),
    rank: int = 8,
    ids: list[int] | None = None,
    head: str = "vanilla",
):
    config = DrafterConfig.for_target(
        target,
        target_layer_ids=taps,
        num_hidden_layers=2,
        block_size=3,
        mask_token_id=0,
        markov_rank=rank,
        markov_head_type=head,
        inject_previous_feature=True,
        draft_vocab_size=len(ids or []),
    )
    return starts.blank_model(config, target, None if ids is None else torch.tensor(ids))


def test_aligned_layers_see_what_the_targets_own_saw(target: Path) -> None:
    model, own = drafter(target), AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        states = own(torch.arange(12)[None], output_hidden_states=True).hidden_states
        taps = torch.cat([states[1][0], states[2][0]], dim=-1)
        starts.align(model, target, taps)
        copied, last = own.model.layers[2:]
        native = copied.input_layernorm(states[2][0])
        torch.testing.assert_close(model.fuse(taps), native, atol=0.05, rtol=0.05)
        assert torch.equal(model.layers[0].self_attn.k_proj.weight, copied.self_attn.k_proj.weight)
        assert torch.equal(model.layers[1].mlp.up_proj.weight, last.mlp.up_proj.weight)
        assert torch.equal(model.norm.weight, own.model.norm.weight)
        assert model.inject_proj is not None
        residual = model.inject_proj(model.fuse(taps))
        cosine = torch.nn.functional.cosine_similarity(residual, states[2][0])
    assert cosine.min() > 0.99
    assert 0.2 < float(residual.norm() / states[2][0].norm()) < 5


@pytest.mark.parametrize(("taps", "first"), [((0, 1), 2), ((0, 2), 2), ((1, 3), 2), ((0,), 1)])
def test_an_aligned_start_copies_what_follows_the_last_tap(
    target: Path, taps: tuple[int, ...], first: int
) -> None:
    model, own = drafter(target, taps=taps), AutoModelForCausalLM.from_pretrained(target)
    starts.align(model, target, torch.ones(1, 32 * len(taps)))
    copied = own.model.layers[first].mlp.up_proj.weight
    assert torch.equal(model.layers[0].mlp.up_proj.weight, copied)


def test_draft_vocabulary_takes_the_most_frequent_and_what_it_must() -> None:
    counts = np.array([5, 0, 9, 9, 0, 1])
    assert starts.draft_vocabulary(counts, 3, always=[4]).tolist() == [2, 3, 4]
    assert starts.draft_vocabulary(counts, 5, always=[]).tolist() == [0, 1, 2, 3, 5]
    assert starts.draft_vocabulary(counts, 99, always=[]).tolist() == [0, 1, 2, 3, 4, 5]


def test_token_counts_are_those_on_the_mask() -> None:
    pairs = [(np.array([1, 1, 2]), np.array([False, True, True]))]
    assert starts.token_counts(pairs, 4).tolist() == [0, 1, 1, 0]


def test_a_rank_above_the_tables_is_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="markov_rank 8 exceeds the draft vocabulary of 5"):
        starts.start_bigrams(drafter(target, rank=8, ids=[1, 2, 3, 4, 5]), [], seed=0)


def test_a_few_strong_bigrams_do_not_inflate_what_follows_the_tanh(tmp_path: Path) -> None:
    """All the gradients before it would be as much larger: the recurrent head could not be trained
    at the vanilla one's rate."""
    target, rng = tiny_target(tmp_path, vocab_size=400), np.random.default_rng(0)
    text = np.minimum(rng.zipf(1.4, size=15_000), 399)
    size = {}
    for head in ("vanilla", "rnn"):
        model = drafter(target, rank=16, head=head)
        starts.start_bigrams(model, [(text, np.ones(len(text), bool))], seed=0)
        size[head] = model.sequential_head.markov_w2.weight.detach().square().mean().item()
    assert size["rnn"] < size["vanilla"]


@pytest.mark.parametrize(("head", "error"), [("vanilla", 1e-4), ("gated", 0.1), ("rnn", 0.1)])
def test_bigram_start_is_the_shrunk_pmi_table(target: Path, head: str, error: float) -> None:
    """Nearly so where the token goes through a gate or a tanh, whatever the hidden rows say."""
    ids = list(range(0, V, 2))
    model = drafter(target, rank=len(ids), ids=ids, head=head)
    rng = np.random.default_rng(0)
    texts = [(rng.integers(V, size=400), rng.random(400) < 0.8) for _ in range(5)]
    starts.start_bigrams(model, texts, seed=0)
    hidden = torch.randn(V, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    state = model.sequential_head.start(V)
    vectors, _ = model.sequential_head.step(hidden, torch.arange(V), state)
    table = model.sequential_head.combine(torch.zeros(V, len(ids)), vectors).detach().numpy()

    counts = np.zeros((V, V))
    for text, mask in texts:
        np.add.at(counts, (text[:-1][mask[1:]], text[1:][mask[1:]]), 1)
    counts = counts[:, ids]
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    pmi = np.where(counts > 0, counts / (counts + 3) * np.log(np.maximum(counts, 1) / expected), 0)
    np.testing.assert_allclose(table, pmi, atol=error * pmi.max())
