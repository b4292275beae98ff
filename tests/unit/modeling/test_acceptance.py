from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.core.errors import InvalidRequestError
from dspark.core.types import SamplingParams, SequenceKey
from dspark.modeling.acceptance import Candidate, decide
from dspark.modeling.drafters.shared import SharedDraftParts
from tests.support.drafters import block_logits
from tests.support.rows import GivenRows
from tests.support.tiny import tiny_target
from tests.support.verifier import GREEDY, greedy_draft, sampled_draft, shared_parts

VOCAB = 40
KEY = SequenceKey(1, 1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SharedDraftParts:
    return shared_parts(tiny_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB))


def peaks(tokens: list[int]) -> torch.Tensor:
    """Logits [N, V] whose argmax is given."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float() * 20


@pytest.mark.parametrize(
    ("drafted", "accepted", "next_token"),
    [([], 0, 3), ([9], 0, 3), ([3, 9], 1, 1), ([3, 1, 4], 3, 7), ([9, 1, 4], 0, 3)],
)
def test_greedy_keeps_up_to_the_first_mismatch(drafted, accepted, next_token) -> None:
    logits = peaks([3, 1, 4, 7])[: len(drafted) + 1]
    [decision] = decide(
        GivenRows(logits), [Candidate(0, 5, GREEDY, greedy_draft(KEY, drafted))], 0, None
    )
    assert (decision.accepted, decision.next_token) == (accepted, next_token)


def test_rejected_where_the_target_gives_no_mass(shared) -> None:
    """The target is certain of other tokens: nothing drafted survives, its own token follows."""
    sampling = SamplingParams(temperature=1.0, nonce=4)
    draft = sampled_draft(shared, KEY, 5, 3, sampling, step=2)
    certain = [(int(token) + 1) % VOCAB for token in draft.tokens]
    [decision] = decide(
        GivenRows(peaks([*certain, 0]) * 10), [Candidate(0, 5, sampling, draft)], 2, shared
    )
    assert (decision.accepted, decision.next_token) == (0, certain[0])
    assert decision.q_gap < 1e-6


def test_where_p_equals_q_everything_is_kept(shared) -> None:
    for step in range(50):
        sampling = SamplingParams(temperature=0.8, nonce=step)
        draft = sampled_draft(shared, KEY, 5, 3, sampling, step)
        hidden = shared.unpack(draft.hidden)
        previous = torch.tensor([5, *draft.tokens[:-1].tolist()])
        logits = block_logits(shared, hidden, previous).detach()
        logits = torch.cat((logits, peaks([6])))
        [decision] = decide(GivenRows(logits), [Candidate(0, 5, sampling, draft)], step, shared)
        assert decision.accepted == 3


def test_an_empty_residual_falls_back_to_the_target(shared) -> None:
    """A drafter that claims too large a q for its token is rejected although p = q."""
    sampling = SamplingParams(temperature=1.0, nonce=1)
    draft = sampled_draft(shared, KEY, 5, 1, sampling, step=0)
    lying = replace(draft, q=np.float32([1e9]))
    own = shared.unpack(draft.hidden)
    logits = block_logits(shared, own, torch.tensor([5])).detach()
    logits = torch.cat((logits, logits))
    [decision] = decide(GivenRows(logits), [Candidate(0, 5, sampling, lying)], 0, shared)
    assert decision.accepted == 0
    assert 0 <= decision.next_token < VOCAB
    assert decision.q_gap > 1e8


def test_a_sampled_draft_needs_the_drafters_parts(shared) -> None:
    sampling = SamplingParams(temperature=1.0)
    draft = sampled_draft(shared, KEY, 5, 1, sampling, step=0)
    with pytest.raises(InvalidRequestError, match="without its drafter"):
        decide(GivenRows(peaks([1, 2])), [Candidate(0, 5, sampling, draft)], 0, None)
    [decision] = decide(GivenRows(peaks([1]) * 10), [Candidate(0, 5, sampling)], 0, None)
    assert (decision.accepted, decision.next_token) == (0, 1)
