"""The batched rule on logits and the fp64 reference decide alike on the same uniforms."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.core import acceptance, sampling
from dspark.core.rng import Purpose, uniform
from dspark.core.types import DraftSource, SamplingParams, SequenceKey
from dspark.modeling.acceptance import Candidate, decide
from tests.support.rows import GivenRows
from tests.support.tiny import tiny_target
from tests.support.verifier import GREEDY, greedy_draft, sampled_draft, shared_parts

VOCAB = 300
TRANSFORMS = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=8),
    SamplingParams(temperature=1.4, top_p=0.8),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.6),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return shared_parts(tiny_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB))


def numpy_decision(logits: torch.Tensor, candidate: Candidate, step: int, shared) -> tuple:
    draft, params = candidate.draft, candidate.sampling
    rows = logits[list(candidate.rows)].double().numpy()
    if params.temperature == 0:
        return acceptance.greedy(draft.tokens.tolist(), rows.argmax(-1).tolist())

    looked_up = draft.source is DraftSource.NGRAM

    def q_row(k: int) -> np.ndarray:
        if looked_up:
            return np.eye(VOCAB)[draft.tokens[k]]
        before = torch.tensor([candidate.anchor, *draft.tokens[:k].tolist()])
        return shared.q_row(
            [shared.unpack(draft.hidden)[: k + 1]],
            [before],
            torch.tensor([params.temperature]),
            torch.tensor([draft.cut[k]]),
        )[0].numpy()

    return acceptance.rejection(
        draft.tokens.tolist(),
        sampling.transform(rows, params.temperature, params.top_k, params.top_p),
        np.ones(len(draft.tokens)) if looked_up else draft.q,
        q_row,
        lambda purpose, index: uniform(params.nonce, step, purpose, index),
    )


def test_decisions_equal_the_reference_in_mixed_batches(shared) -> None:
    rng = np.random.default_rng(0)
    outcomes = {"all": 0, "some": 0, "none": 0}
    for step in range(12):
        candidates, blocks, first = [], [], 0
        for i in range(24):
            base = TRANSFORMS[i % 4]
            length = int(rng.integers(0, 6))
            anchor = int(rng.integers(VOCAB))
            params = SamplingParams(base.temperature, base.top_k, base.top_p, nonce=100 * step + i)
            key = SequenceKey(1, i)
            draft = sampled_draft(shared, key, anchor, length, params, step)
            if i % 6 == 5:
                params, draft = GREEDY, greedy_draft(key, rng.integers(0, VOCAB, length).tolist())
            elif i % 6 == 4:  # of tokens the target may well have cut away
                looked_up = greedy_draft(key, rng.integers(0, VOCAB, length).tolist())
                draft = replace(looked_up, source=DraftSource.NGRAM)
            logits = torch.from_numpy(rng.normal(0, 2, (length + 1, VOCAB))).float()
            for k, token in enumerate(draft.tokens.tolist()):  # a target that often agrees
                logits[k, token] += rng.choice([0.0, 4.0, 9.0])
            candidates.append(Candidate(first, anchor, params, draft))
            blocks.append(logits)
            first += length + 1
        logits = torch.cat(blocks)
        for candidate, decision in zip(
            candidates, decide(GivenRows(logits), candidates, step, shared), strict=True
        ):
            expected = numpy_decision(logits, candidate, step, shared)
            assert (decision.accepted, decision.next_token) == expected
            length = len(candidate.drafted)
            kept = "all" if decision.accepted == length else "some" if decision.accepted else "none"
            outcomes[kept] += 1
    assert min(outcomes.values()) > 30


def test_uniforms_of_each_purpose_are_their_own() -> None:
    """The correction must not reuse the uniform that rejected: the two would be dependent."""
    keys = [uniform(1, 2, purpose, 0) for purpose in Purpose]
    assert len(set(keys)) == len(Purpose)
