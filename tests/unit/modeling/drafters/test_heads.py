"""The sequential heads against their formulas, with the weights' published names and order."""

import pytest
import torch

from dspark.modeling.drafters.heads import CandidateSelector, certainty
from tests.support.drafters import DRAFT_VOCAB, HIDDEN, METHODS, VOCAB, random_config, random_model

ROWS, K = 3, 4


@pytest.fixture
def blocks() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(ROWS, K, HIDDEN), torch.randint(VOCAB, (ROWS, K))


@torch.no_grad()
def by_steps(head, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    state, found = head.start(ROWS), []
    for k in range(K):
        vectors, state = head.step(hidden[:, k], previous[:, k], state)
        found.append(vectors)
    return torch.stack(found, 1)


@pytest.mark.parametrize("kind", METHODS)
def test_a_walk_and_a_whole_block_agree(kind: str, blocks) -> None:
    head = random_model(random_config(**METHODS[kind])).sequential_head
    vectors = head.vectors(*blocks)
    assert vectors.shape == (ROWS, K, head.rank)
    torch.testing.assert_close(vectors, by_steps(head, *blocks))


def test_a_gate_scales_each_entry_of_the_bigram_vector(blocks) -> None:
    hidden, previous = blocks
    head = random_model(random_config(**METHODS["gated"])).sequential_head
    weights = head.state_dict()
    base = torch.randn(ROWS, DRAFT_VOCAB)
    with torch.no_grad():
        vectors = weights["markov_w1.weight"][previous]
        joined = torch.cat((hidden, vectors), -1)  # hidden first, as the published weights have it
        gate = joined @ weights["gate_proj.weight"].T + weights["gate_proj.bias"]
        expected = gate.sigmoid() * vectors
        found = head.vectors(hidden, previous)
        torch.testing.assert_close(found, expected)
        bias = expected[:, 0] @ weights["markov_w2.weight"].T
        torch.testing.assert_close(head.combine(base, found[:, 0]), base + bias)


def test_the_recurrence_reads_the_state_of_the_position_before(blocks) -> None:
    hidden, previous = blocks
    head = random_model(random_config(**METHODS["rnn"])).sequential_head
    weights = head.state_dict()
    state = torch.zeros(ROWS, 8)
    with torch.no_grad():
        found = head.vectors(hidden, previous)
        for k in range(K):
            token = weights["markov_w1.weight"][previous[:, k]]
            joined = torch.cat((state, token, hidden[:, k]), -1)
            joint = joined @ weights["joint_proj.weight"].T + weights["joint_proj.bias"]
            gate, candidate, out = joint.split(8, -1)
            torch.testing.assert_close(found[:, k], out.tanh())
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()


def test_a_selector_scores_only_the_likeliest(blocks) -> None:
    hidden, previous = blocks
    config = random_config(**METHODS["dflash2"], selector_top_k=5)
    head = random_model(config).sequential_head
    assert isinstance(head, CandidateSelector)
    base = torch.randn(ROWS, DRAFT_VOCAB)
    weights = head.state_dict()
    with torch.no_grad():
        logits = head.combine(base, head.vectors(hidden, previous)[:, 1])
        projected = hidden[:, 1] @ weights["hidden_projection.weight"].T
        pair = weights["predecessor_codebook"][previous[:, 1]] * projected
        everywhere = base + pair @ weights["successor_codebook"].T
    for row in range(ROWS):
        kept = set(base[row].topk(5).indices.tolist())
        for column in range(DRAFT_VOCAB):
            expected = everywhere[row, column] if column in kept else torch.tensor(-torch.inf)
            torch.testing.assert_close(logits[row, column], expected)


def test_a_selector_without_a_projection_is_the_parallel_pass() -> None:
    """Its choice is then the argmax of the logits that it is given."""
    model = random_model(random_config(**METHODS["dflash2"]))
    head = model.sequential_head
    assert isinstance(head, CandidateSelector)
    torch.nn.init.zeros_(head.hidden_projection.weight)
    base = torch.randn(ROWS, DRAFT_VOCAB)
    vectors, _ = head.step(torch.randn(ROWS, HIDDEN), torch.zeros(ROWS, dtype=torch.int64), None)
    assert torch.equal(head.combine(base, vectors).argmax(-1), base.argmax(-1))


def test_certainty_is_finite_and_rises() -> None:
    values = certainty(torch.tensor([0.0, 0.01, 0.5, 0.99, 1.0]))
    assert torch.isfinite(values).all()
    assert (values.diff() > 0).all()
    assert values[2] == 0.0
