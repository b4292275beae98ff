from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.core.errors import DrafterError
from dspark.core.rng import Purpose, uniform
from dspark.core.sampling import cut_threshold, inverse_cdf, transform
from dspark.core.types import Draft, DraftBatch, DraftRow, SamplingParams, SequenceKey
from dspark.modeling.draft_worker import DraftWorker
from dspark.modeling.drafters.heads import certainty
from dspark.modeling.drafters.interface import Drafter, teacher_forced
from dspark.modeling.drafters.shared import SharedDraftParts
from tests.support.drafters import (
    HIDDEN,
    METHODS,
    VOCAB,
    block_logits,
    prefixes,
    random_config,
    random_model,
)

GREEDY = SamplingParams(temperature=0)
KEY = SequenceKey(1, 1)
FEATURES = torch.randn(600, HIDDEN, generator=torch.Generator().manual_seed(9)).bfloat16().float()


def make_model(kind: str = "dspark") -> Drafter:
    return random_model(random_config(**METHODS[kind], inject_previous_feature=True))


def make_worker(precision: str = "fp32", kind: str = "dspark") -> DraftWorker:
    return DraftWorker(
        make_model(kind), name="tiny", incarnation=5, target_digest="t", precision=precision
    )


def row(
    base: int,
    end: int,
    sampling: SamplingParams = GREEDY,
    *,
    key: SequenceKey = KEY,
    num_draft: int = 4,
    shift: int = 0,
) -> DraftRow:
    """Tokens base..end of a fixed text (another one for each shift), with their features."""
    tokens = [(7 * i + shift) % VOCAB for i in range(base, end)]
    rows = FEATURES[shift + max(base - 1, 0) : shift + end - 1]
    features = rows.bfloat16().view(torch.int16).numpy().tobytes()
    return DraftRow(key, base, tokens, features, num_draft, sampling)


def ask(worker: DraftWorker, *rows: DraftRow, step: int = 1) -> tuple[Draft, ...]:
    return worker.draft(DraftBatch(step, rows)).drafts


def same(first: Draft, second: Draft) -> bool:
    return (
        np.array_equal(first.tokens, second.tokens)
        and np.allclose(first.confidence_logits, second.confidence_logits, atol=1e-4)
        and (first.q is None) == (second.q is None)
        and (first.q is None or np.allclose(first.q, second.q, atol=1e-5))
    )


@pytest.mark.parametrize("kind", METHODS)
def test_greedy_drafts_follow_the_training_path(kind: str) -> None:
    """Teacher forcing with the drafted tokens themselves gives the logits that chose them."""
    model, end = make_model(kind), 30
    text = torch.tensor([7 * i % VOCAB for i in range(end)])
    (draft,) = ask(make_worker(kind=kind), row(0, end, num_draft=model.config.block_size))
    previous = torch.tensor([int(text[-1]), *draft.tokens[:-1].tolist()])
    at = torch.tensor([end - 1])
    with torch.no_grad():
        blocks = model.open_blocks(FEATURES[: end - 1], text, at, len(previous))
        hidden = teacher_forced(blocks, previous[None])[0].bfloat16().float()
        logits = block_logits(model, hidden, previous)
        confidence = model.confidence(hidden, previous)
    if confidence is None:
        confidence = certainty(logits.softmax(-1).amax(-1))
    assert draft.tokens.tolist() == model.draft_vocab.ids[logits.argmax(-1)].tolist()
    np.testing.assert_allclose(draft.confidence_logits, confidence, rtol=1e-3, atol=1e-3)
    assert draft.q is None
    assert draft.cut is None
    assert draft.hidden == b""


def test_certainty_does_not_depend_on_the_token_drawn() -> None:
    """Of the first position: later ones may look at the tokens before them."""
    found = set()
    for nonce in range(6):
        sampling = SamplingParams(temperature=1.0, nonce=nonce)
        (draft,) = ask(make_worker(kind="dflash"), row(0, 20, sampling))
        found.add((int(draft.tokens[0]), float(draft.confidence_logits[0])))
    assert len({token for token, _ in found}) > 1
    assert len({confidence for _, confidence in found}) == 1


def test_rough_greedy_drafts_are_off_by_no_more_than_rounding() -> None:
    """In bf16 a draft token may not be the likeliest one, but then the two are as good as equal."""
    sampling = SamplingParams(temperature=1.0)
    worker = make_worker("bf16")
    for end in (10, 60, 200):
        (rough,) = ask(worker, row(0, end))
        shared = worker._shared
        (packed,) = (d.hidden for d in ask(make_worker("bf16"), row(0, end, sampling)))
        previous = torch.tensor([7 * (end - 1) % VOCAB, *rough.tokens[:-1].tolist()])
        with torch.no_grad():
            logits = block_logits(shared, shared.unpack(packed), previous)
        columns = [shared.draft_ids.tolist().index(token) for token in rough.tokens]
        chosen = logits[torch.arange(4), torch.tensor(columns)]
        assert (logits.amax(-1) - chosen < 2**-7 * logits.abs().amax(-1)).all()


def test_steps_equal_a_fresh_start() -> None:
    worker = make_worker()
    for base, end in ((0, 10), (10, 11), (11, 15), (15, 15), (15, 290)):
        (draft,) = ask(worker, row(base, end))
        (fresh,) = ask(make_worker(), row(0, end))
        assert draft.in_sync
        assert same(draft, fresh)


def test_a_ragged_mixed_batch_equals_one_by_one() -> None:
    sampled = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, nonce=3)
    rows = [
        row(0, 5, key=SequenceKey(1, 1)),
        row(0, 270, sampled, key=SequenceKey(1, 2), shift=1),
        row(0, 1, key=SequenceKey(1, 3), num_draft=2, shift=2),
        row(0, 40, replace(sampled, temperature=1.5), key=SequenceKey(2, 1), num_draft=3, shift=3),
        row(0, 12, key=SequenceKey(2, 2), num_draft=0, shift=4),
    ]
    together = ask(make_worker(), *rows)
    assert [len(draft.tokens) for draft in together] == [4, 4, 2, 3, 0]
    for draft, wanted in zip(together, rows, strict=True):
        (alone,) = ask(make_worker(), wanted)
        assert draft.key == wanted.key
        assert draft.in_sync
        assert same(draft, alone)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, nonce=11),
        SamplingParams(temperature=0.6, top_k=5, nonce=12),
        SamplingParams(temperature=1.3, top_p=0.7, nonce=13),
        SamplingParams(temperature=0.9, top_k=10, top_p=0.8, nonce=14),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "fp16w", "bf16"])
@pytest.mark.parametrize("kind", METHODS)
def test_the_verifier_rebuilds_q_from_what_was_sent(
    sampling: SamplingParams, precision: str, kind: str
) -> None:
    size = make_model(kind).config.block_size
    (draft,) = ask(make_worker(precision, kind), row(0, 25, sampling, num_draft=size), step=8)
    shared = SharedDraftParts.from_model(make_model(kind), precision)
    previous = torch.tensor([7 * 24 % VOCAB, *draft.tokens[:-1].tolist()])
    rebuilt = shared.q_row(
        prefixes(shared.unpack(draft.hidden)),
        prefixes(previous),
        torch.full((size,), sampling.temperature),
        torch.from_numpy(draft.cut),
    )
    np.testing.assert_allclose(
        rebuilt[torch.arange(size), torch.from_numpy(draft.tokens)].numpy(), draft.q, atol=1e-6
    )
    assert (draft.q > 0).all()


def test_sampled_tokens_are_the_reference_transform_at_their_own_uniforms() -> None:
    sampling = SamplingParams(temperature=0.7, top_k=30, top_p=0.9, nonce=77)
    (draft,) = ask(make_worker(), row(0, 25, sampling), step=8)
    model = make_model()
    shared = SharedDraftParts.from_model(model, "fp32")
    previous = torch.tensor([7 * 24 % VOCAB])
    for k, hidden in enumerate(shared.unpack(draft.hidden)):
        with torch.no_grad():
            logits = block_logits(shared, hidden[None], previous).numpy()[0]
        args = logits, sampling.temperature, sampling.top_k, sampling.top_p
        column = inverse_cdf(transform(*args), uniform(77, 8, Purpose.DRAFT, k))
        assert draft.tokens[k] == model.draft_vocab.ids[column]
        np.testing.assert_allclose(draft.q[k], transform(*args)[column], rtol=1e-4)
        np.testing.assert_allclose(draft.cut[k], cut_threshold(*args), rtol=1e-4)
        previous = torch.tensor([draft.tokens[k]])


def test_a_block_has_its_own_uniforms_in_every_step_and_request() -> None:
    hot = SamplingParams(temperature=5.0, nonce=1)
    blocks = [
        ask(make_worker(), row(0, 25, sampling), step=step)[0].tokens.tolist()
        for sampling, step in ((hot, 1), (hot, 1), (hot, 2), (replace(hot, nonce=2), 1))
    ]
    assert blocks[0] == blocks[1]
    assert blocks[0] != blocks[2]
    assert blocks[0] != blocks[3]


def test_another_length_is_out_of_sync_and_changes_nothing() -> None:
    worker = make_worker()
    ask(worker, row(0, 10))
    other = SequenceKey(1, 2)
    wrong, unknown = ask(worker, row(9, 12), row(4, 6, key=other))
    assert not wrong.in_sync
    assert not unknown.in_sync
    assert len(wrong.tokens) == 0
    (right,) = ask(worker, row(10, 12))
    assert same(right, ask(make_worker(), row(0, 12))[0])


def test_base_zero_starts_afresh() -> None:
    worker = make_worker()
    ask(worker, row(0, 50))
    (again,) = ask(worker, row(0, 20, shift=5))
    assert same(again, ask(make_worker(), row(0, 20, shift=5))[0])


def test_close_frees_a_sequence() -> None:
    worker = make_worker()
    ask(worker, row(0, 10))
    worker.draft(DraftBatch(2, (), close=(KEY, SequenceKey(9, 9))))
    assert not worker._sequences
    (draft,) = ask(worker, row(10, 12))
    assert not draft.in_sync


def test_a_new_scheduler_frees_what_the_old_one_left() -> None:
    worker = make_worker()
    ask(worker, row(0, 10), row(0, 10, key=SequenceKey(1, 2)))
    worker.draft(DraftBatch(2, ()))
    assert len(worker._sequences) == 2
    successor = SequenceKey(7, 1)
    ask(worker, row(0, 10, key=successor))
    assert set(worker._sequences) == {successor}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(row(0, 10), features=b"12"), "expected 576"),
        (replace(row(0, 10), num_draft=5), "at most 4"),
        (replace(row(0, 10), tokens=[], features=b""), "without tokens"),
    ],
)
def test_a_row_that_contradicts_itself_leaves_the_others_alone(bad: DraftRow, message: str) -> None:
    worker, other = make_worker(), SequenceKey(1, 2)
    ask(worker, row(0, 10, key=other))
    with pytest.raises(DrafterError, match=message):
        ask(worker, row(10, 12, key=other), bad)
    (draft,) = ask(worker, row(10, 12, key=other))
    assert draft.in_sync


def test_info_names_what_the_handshake_compares() -> None:
    info = make_worker().info
    assert (info.name, info.incarnation, info.target_digest) == ("tiny", 5, "t")
    assert info.block_size == 4
    assert info.fusion_digest == SharedDraftParts.from_model(make_model(), "fp32").digest
