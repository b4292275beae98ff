"""Whatever the drafter proposes, `rejection` mode puts out the target's own distribution.

The numpy rule is enumerated exactly elsewhere; here the batched rule over real logits, the shared
draft parts and the counter-based uniforms is drawn from many times and tested by chi-square.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.core.rng import Purpose, uniform
from dspark.core.sampling import transform
from dspark.core.statistics import chi_square_p_value
from dspark.core.types import Draft, SamplingParams, SequenceKey
from dspark.modeling.acceptance import Candidate, decide
from dspark.modeling.drafters.shared import SharedDraftParts
from dspark.modeling.sampling import draw, probabilities
from tests.support.rows import GivenRows
from tests.support.tiny import tiny_target
from tests.support.verifier import shared_parts

VOCAB, BLOCK, DRAWS, ANCHOR = 8, 3, 20_000, 5
SIGNIFICANCE = 1e-4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SharedDraftParts:
    folder: Path = tmp_path_factory.mktemp("target")
    return shared_parts(tiny_target(folder, vocab_size=VOCAB), scale=0.8)


@pytest.fixture(scope="module")
def bigrams() -> torch.Tensor:
    """Target logits [V, V]: the next token depends on the one before it."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)) * 1.2


@torch.no_grad()
def draft_blocks(
    shared: SharedDraftParts, sampling: SamplingParams, nonces: np.ndarray, step: int
) -> list[Draft]:
    """One block a nonce, drawn token by token as a drafter does, all from the same hidden rows."""
    hidden = torch.randn(
        BLOCK, shared.config.hidden_size, generator=torch.Generator().manual_seed(3)
    )
    wire = shared.pack(hidden)
    rows = shared.unpack(wire)
    base = shared.base_logits(rows)
    previous = torch.full((len(nonces),), ANCHOR)
    tokens, sent, cuts = [], [], []
    head = shared.sequential_head
    for k in range(BLOCK):
        vectors, _ = head.step(rows[k].expand(len(nonces), -1), previous, None)
        logits = head.combine(base[k].expand(len(nonces), -1), vectors)
        q, cut = probabilities(logits, [sampling] * len(nonces))
        previous = torch.from_numpy(draw(q, uniform(nonces, step, Purpose.DRAFT, k)))
        tokens.append(previous.numpy())
        sent.append(q.gather(1, previous[:, None])[:, 0].numpy())
        cuts.append(cut.numpy())
    columns = zip(np.stack(tokens, 1), np.stack(sent, 1), np.stack(cuts, 1), strict=True)
    zeros = np.zeros(BLOCK, np.float32)
    key = SequenceKey(1, 1)
    return [Draft(key, token, zeros, True, q, cut, wire) for token, q, cut in columns]


def two_tokens(
    shared: SharedDraftParts, bigrams: torch.Tensor, sampling: SamplingParams
) -> tuple[np.ndarray, float]:
    """Counts [V, V] of the first two output tokens, and the mean number accepted."""
    nonces = np.arange(DRAWS, dtype=np.uint64)
    drafts = draft_blocks(shared, sampling, nonces, step=0)
    params = [
        SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, int(nonce))
        for nonce in nonces
    ]
    texts = np.stack([np.array([ANCHOR, *draft.tokens]) for draft in drafts])
    logits = bigrams[torch.from_numpy(texts.reshape(-1))]
    rows = range(0, len(logits), BLOCK + 1)
    candidates = [
        Candidate(row, ANCHOR, s, d) for row, s, d in zip(rows, params, drafts, strict=True)
    ]
    first = decide(GivenRows(logits), candidates, 0, shared)
    output = [
        [*draft.tokens[: d.accepted].tolist(), d.next_token]
        for draft, d in zip(drafts, first, strict=True)
    ]
    # Where one token came out, the next step (here without a draft) makes the second.
    last = torch.tensor([text[-1] for text in output])
    following = [
        Candidate(i, text[-1], s) for i, (text, s) in enumerate(zip(output, params, strict=True))
    ]
    second = decide(GivenRows(bigrams[last]), following, 1, shared)
    counts = np.zeros((VOCAB, VOCAB))
    for text, decision in zip(output, second, strict=True):
        a, b = [*text, decision.next_token][:2]
        counts[a, b] += 1
    return counts, float(np.mean([d.accepted for d in first]))


def target_law(bigrams: torch.Tensor, sampling: SamplingParams) -> np.ndarray:
    p = transform(bigrams.numpy(), sampling.temperature, sampling.top_k, sampling.top_p)
    return p[ANCHOR][:, None] * p


def biased(bigrams: torch.Tensor, sampling: SamplingParams, amount: float) -> torch.Tensor:
    """Logits whose distribution behind the anchor has `amount` moved between its two likeliest."""
    p = transform(bigrams.numpy(), sampling.temperature, sampling.top_k, sampling.top_p)[ANCHOR]
    low, high = np.argsort(p)[-2:]
    p[low] += amount
    p[high] -= amount
    moved = bigrams.clone()
    with np.errstate(divide="ignore"):
        moved[ANCHOR] = torch.from_numpy(np.log(p) * sampling.temperature).float()
    return moved


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.9, top_k=6, top_p=0.9),
    ],
    ids=["plain", "top-k and top-p"],
)
def test_two_token_law_is_the_targets(shared, bigrams, sampling) -> None:
    law = target_law(bigrams, sampling)
    counts, accepted = two_tokens(shared, bigrams, sampling)
    assert 0.2 < accepted < BLOCK - 0.2  # both branches of the rule are at work
    assert counts[law == 0].sum() == 0
    possible = law > 0
    assert chi_square_p_value(counts[possible], law[possible]) > SIGNIFICANCE


def test_the_test_sees_a_bias_of_two_percent(shared, bigrams) -> None:
    sampling = SamplingParams(temperature=0.9, top_k=6, top_p=0.9)
    law = target_law(bigrams, sampling)
    counts, _ = two_tokens(shared, biased(bigrams, sampling, 0.02), sampling)
    possible = law > 0
    assert chi_square_p_value(counts[possible], law[possible]) < SIGNIFICANCE
