from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.core.errors import InvalidRequestError, OutOfBlocksError, UnknownSequenceError
from dspark.core.types import (
    Draft,
    OpenSequence,
    ProfileShape,
    RowStatus,
    SamplingParams,
    SequenceKey,
    VerifyBatch,
    VerifyRow,
)
from dspark.modeling.drafters.shared import SharedDraftParts
from dspark.modeling.target_worker import TargetWorker
from tests.support.tiny import tiny_target
from tests.support.verifier import (
    GREEDY,
    Request,
    greedy_draft,
    plain,
    run_all,
    run_step,
    sampled_draft,
    shared_parts,
    target_worker,
    trimmed,
)

VOCAB = 64


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return tiny_target(folder, family=request.param, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def shared(target) -> SharedDraftParts:
    return shared_parts(target)


@pytest.fixture(scope="module")
def reference(target) -> TargetWorker:
    """Decodes plainly, for comparison."""
    return target_worker(target)


@pytest.fixture
def worker(target, shared) -> TargetWorker:
    return target_worker(target, shared)


def key(sequence: int, incarnation: int = 7) -> SequenceKey:
    return SequenceKey(incarnation, sequence)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def random_drafter(request_key: SequenceKey, seed: int):
    rng = np.random.default_rng(seed)
    return lambda tokens, step: greedy_draft(
        request_key, rng.integers(0, VOCAB, rng.integers(0, 6)).tolist()
    )


def oracle_drafter(request_key: SequenceKey, text: list[int], width: int, wrong_at: int | None):
    """Proposes what plain decoding says, with one token of each block made wrong if asked to."""

    def draft(tokens: list[int], step: int) -> Draft:
        block = text[len(tokens) : len(tokens) + width]
        if wrong_at is not None and wrong_at < len(block):
            block = [*block[:wrong_at], (block[wrong_at] + 1) % VOCAB, *block[wrong_at + 1 :]]
        return greedy_draft(request_key, block)

    return draft


def test_greedy_with_any_draft_equals_plain_decoding(reference, worker) -> None:
    """Random, perfect and adversarial drafts of several widths, chunked prefill, joins, leaves."""
    requests, arrivals = [], {}
    for i in range(14):
        tokens, max_new = prompt(3 + 5 * (i % 5), i), 6 + 3 * (i % 4)
        text = tokens + plain(reference, tokens, max_new)
        drafter = random_drafter(key(i), i)
        if i % 3 == 1:
            drafter = oracle_drafter(key(i), text, 1 + i % 5, None)
        elif i % 3 == 2:
            drafter = oracle_drafter(key(i), text, 4, i % 4)
        request = Request(key(i), tokens, max_new, drafter, chunk=4 + i)
        requests.append((request, text))
        arrivals.setdefault(i // 2, []).append(request)
    free = worker.num_free_blocks
    run_all(worker, arrivals)
    for request, text in requests:
        assert request.tokens[: len(text)] == text
    perfect = requests[4][0]  # width 5: every token accepted
    commits = sum(verdict.next_token is not None for verdict in perfect.verdicts)
    assert perfect.accepted == len(perfect.output) - commits > 0
    assert requests[5][0].accepted > 0  # wrong only at the third place
    assert worker.num_free_blocks == free


def test_without_a_drafter_there_are_no_features(target) -> None:
    worker = target_worker(target)
    request = Request(key(1), prompt(9, 0), 4, want_features=True)
    run_step(worker, [request], 0)
    assert request.features == b""
    assert worker.features(key(1), 0, 9) == b""
    assert worker.info.fusion_digest == ""


def test_only_what_was_kept_leaves_features(target, shared, reference, worker) -> None:
    """Features show the hidden states: with drafts that are half right they equal those of a run
    that never drafted, up to one rounding of the wire dtype."""
    text = prompt(10, 1)
    output = plain(reference, text, 16)
    drafter = oracle_drafter(key(1), text + output, 4, wrong_at=2)
    drafting = Request(key(1), text, 16, drafter, want_features=True, chunk=3)
    calm = Request(key(2), text, 16, want_features=True, chunk=3)
    run_all(worker, {0: [drafting]})
    run_all(target_worker(target, shared), {0: [calm]})
    assert drafting.output == calm.output == output
    assert drafting.accepted >= 8
    rows, expected = shared.unpack(drafting.features), shared.unpack(calm.features)
    assert len(rows) == len(text) + 16 - 1
    torch.testing.assert_close(rows, expected, rtol=2**-7, atol=2**-7)


def test_the_scheduler_can_roll_back_to_what_it_kept(worker) -> None:
    """A stop inside a block: the scheduler keeps fewer tokens than the verifier committed."""
    request = Request(key(1), prompt(6, 2), 30)
    for step in range(6):
        run_step(worker, [request], step)
    expected = list(request.tokens)
    del request.tokens[8:]
    request.computed_len = 7
    for step in range(6, 10):
        run_step(worker, [request], step)
    assert request.tokens == expected


def test_rolling_back_into_the_prompt_needs_an_opening(worker) -> None:
    request = Request(key(1), prompt(6, 2), 30)
    run_step(worker, [request], 0)
    [verdict] = worker.verify(VerifyBatch(1, (VerifyRow(key(1), 5, 9),))).verdicts
    assert verdict.status is RowStatus.UNKNOWN


def test_a_prefix_hit_changes_neither_output_nor_features(reference, worker) -> None:
    text = prompt(22, 3)
    first = Request(key(1), text, 8, want_features=True)
    second = Request(key(2), text, 8, want_features=True, chunk=2)
    third = Request(key(3), [*text[:13], *prompt(4, 8)], 8, want_features=True)
    alone = plain(reference, third.prompt, 8)
    run_all(worker, {0: [first], 2: [second], 20: [third]})
    assert [r.verdicts[0].cached_len for r in (first, second, third)] == [0, 20, 12]
    assert second.output == first.output
    assert second.features == first.features
    assert third.output == alone


def test_a_prefix_hit_lies_in_consecutive_blocks_of_its_own(reference, worker) -> None:
    text = prompt(22, 3)
    first, second = (Request(key(i), text, 8, want_features=True) for i in (1, 2))
    run_step(worker, [first], 0)
    run_step(worker, [first, second], 1)
    held = [worker._sequences.get(key(i)).blocks for i in (1, 2)]
    assert not set(held[0]) & set(held[1])
    for blocks in held:
        assert blocks == list(range(blocks[0], blocks[0] + len(blocks)))
    assert second.verdicts[0].cached_len == 20


def test_without_a_run_of_blocks_a_prefix_is_shared(target, shared, reference) -> None:
    small = target_worker(target, shared, num_blocks=15)
    text = prompt(22, 3)
    first, second = (Request(key(i), text, 8, want_features=True) for i in (1, 2))
    run_step(small, [first], 0)
    run_step(small, [first, second], 1)
    held = [small._sequences.get(key(i)).blocks for i in (1, 2)]
    assert held[0][:5] == held[1][:5]
    run_all(small, {2: [first], 3: [second]})
    assert second.output == first.output == plain(reference, text, 8)
    assert second.features == first.features


def test_the_whole_prompt_is_never_a_hit(worker) -> None:
    text = prompt(8, 3)  # two full blocks
    for sequence in (1, 2):
        request = Request(key(sequence), text, 2)
        run_step(worker, [request], sequence)
    assert request.verdicts[0].cached_len == 4


def test_output_blocks_are_hits_after_the_close(worker) -> None:
    first = Request(key(1), prompt(6, 5), 10, random_drafter(key(1), 1), want_features=True)
    run_all(worker, {0: [first]})
    again = Request(key(2), first.tokens[:15], 3, want_features=True)
    run_step(worker, [again], 30)
    assert again.verdicts[0].cached_len == 12
    assert again.features[: 12 * 64] == first.features[: 12 * 64]


def test_features_can_be_fetched_again(shared, worker) -> None:
    request = Request(key(1), prompt(9, 6), 20, random_drafter(key(1), 2), want_features=True)
    for step in range(5):
        run_step(worker, [request], step)
    row = 2 * shared.config.hidden_size
    assert worker.features(key(1), 0, request.computed_len) == request.features
    assert worker.features(key(1), 3, 5) == request.features[3 * row : 5 * row]
    with pytest.raises(UnknownSequenceError, match="processed up to"):
        worker.features(key(1), 0, request.computed_len + 1)
    with pytest.raises(UnknownSequenceError, match="not open"):
        worker.features(key(2), 0, 1)


# --- repeated, late and lost messages ---------------------------------------------------------


def opening(sequence: int, tokens: list[int], max_len: int = 40, **row) -> VerifyRow:
    return VerifyRow(
        key(sequence), len(tokens), 100, OpenSequence(tuple(tokens), GREEDY, max_len), **row
    )


def test_a_repeat_returns_the_stored_verdict(worker) -> None:
    batch = VerifyBatch(3, (opening(1, prompt(9, 0), want_features=True), opening(2, [1, 2])))
    first = worker.verify(batch)
    again = worker.verify(batch)
    assert again.verdicts == first.verdicts
    assert first.batch_tokens == 11
    assert again.batch_tokens == 0
    subset = worker.verify(VerifyBatch(3, batch.rows[1:]))
    assert subset.verdicts == first.verdicts[1:]


def test_another_payload_for_the_same_step_is_a_conflict(worker) -> None:
    worker.verify(VerifyBatch(0, (opening(1, [1, 2, 3]),)))
    row = VerifyRow(key(1), 4, 1, draft=greedy_draft(key(1), [5]))
    [verdict] = worker.verify(VerifyBatch(1, (row,))).verdicts
    for other in (
        VerifyRow(key(1), 4, 1, draft=greedy_draft(key(1), [6])),
        VerifyRow(key(1), 4, 1),
        VerifyRow(key(1), 4, 2, draft=row.draft),
        opening(1, [1, 2, 3]),
    ):
        [answer] = worker.verify(VerifyBatch(1, (other,))).verdicts
        assert answer.status is RowStatus.CONFLICT
    assert worker.verify(VerifyBatch(1, (row,))).verdicts == (verdict,)


def test_an_older_step_is_stale_and_changes_nothing(reference, worker) -> None:
    request = Request(key(1), prompt(5, 0), 20)
    late = request.row(4)
    run_step(worker, [request], 4)
    run_step(worker, [request], 5)
    [verdict] = worker.verify(VerifyBatch(4, (late,))).verdicts
    assert verdict.status is RowStatus.STALE
    assert verdict.computed_len == request.computed_len
    run_step(worker, [request], 6)
    assert request.output == plain(reference, request.prompt, 3)


def test_a_late_opening_does_not_bring_a_closed_sequence_back(worker) -> None:
    row = opening(1, [1, 2, 3])
    worker.verify(VerifyBatch(1, (row,)))
    free = worker.num_free_blocks
    worker.verify(VerifyBatch(2, (), close=(key(1),)))
    worker.verify(VerifyBatch(3, (opening(2, [4, 5, 6]),)))
    [verdict] = worker.verify(VerifyBatch(1, (row,))).verdicts
    assert verdict.status is RowStatus.STALE
    assert worker.num_free_blocks == free


def test_what_is_not_held_is_unknown(worker) -> None:
    worker.verify(VerifyBatch(0, (opening(1, [1, 2, 3]),)))
    rows = (VerifyRow(key(1), 9, 1), VerifyRow(key(2), 4, 1))
    reply = worker.verify(VerifyBatch(1, rows))
    assert [v.status for v in reply.verdicts] == [RowStatus.UNKNOWN] * 2
    assert reply.batch_tokens == 0
    [verdict] = worker.verify(VerifyBatch(2, (opening(2, [4, 5, 6]),))).verdicts
    assert verdict.status is RowStatus.OK


def test_a_new_scheduler_frees_what_the_old_one_left(worker) -> None:
    free = worker.num_free_blocks
    worker.verify(VerifyBatch(9, (opening(1, [1, 2, 3]),)))
    fresh = Request(key(1, incarnation=8), [4, 5, 6], 20)
    run_step(worker, [fresh], 0)
    worker.verify(VerifyBatch(1, (), close=(fresh.key,)))
    assert worker.num_free_blocks == free


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (VerifyRow(key(1), 4, 0), "no pending token"),
        (opening(2, [1, VOCAB]), "outside the vocabulary"),
        (opening(2, [1, 2], max_len=1), "room for 1"),
        (opening(2, [1, 2], max_len=10_000), "holds at most"),
        (
            VerifyRow(key(2), 3, 9, OpenSequence((1, 2), GREEDY, 9)),
            "opens with 2 tokens but claims 3",
        ),
        (VerifyRow(key(1), 4, 1, draft=greedy_draft(key(1), [VOCAB])), "outside the vocabulary"),
        (VerifyRow(key(1), 4, 1, draft=greedy_draft(key(1), [0] * 50)), "opened for 40"),
    ],
)
def test_a_contradictory_row_is_refused(worker, row, message) -> None:
    worker.verify(VerifyBatch(0, (opening(1, [1, 2, 3]),)))
    with pytest.raises(InvalidRequestError, match=message):
        worker.verify(VerifyBatch(1, (row,)))
    [verdict] = worker.verify(VerifyBatch(2, (VerifyRow(key(1), 4, 1),))).verdicts
    assert verdict.status is RowStatus.OK


def test_two_rows_of_one_sequence_are_refused(worker) -> None:
    with pytest.raises(InvalidRequestError, match="two rows"):
        worker.verify(VerifyBatch(0, (opening(1, [1]), opening(1, [1]))))


def test_a_full_cache_refuses_and_recovers(target) -> None:
    worker = target_worker(target, num_blocks=8)
    worker.verify(VerifyBatch(0, (opening(1, prompt(10, 0), max_len=24),)))
    batch = VerifyBatch(1, (VerifyRow(key(1), 11, 1), opening(2, prompt(10, 1), max_len=24)))
    with pytest.raises(OutOfBlocksError):
        worker.verify(batch)
    retry = VerifyBatch(1, batch.rows[1:], close=(key(1),))
    assert worker.verify(retry).verdicts[0].status is RowStatus.OK


# --- sampling ---------------------------------------------------------------------------------


def test_modes_mix_in_one_batch(reference, shared, worker) -> None:
    """Sampling from the single likeliest token is greedy, so its output is known."""
    requests = []
    for i in range(8):
        sampling = GREEDY if i % 2 else SamplingParams(temperature=0.7, top_k=1, nonce=i)

        def drafter(tokens: list[int], step: int, i=i, sampling=sampling) -> Draft:
            draft = sampled_draft(
                shared, key(i), tokens[-1], 4, SamplingParams(nonce=i, temperature=0.7), step
            )
            return trimmed(draft, step % 5)

        requests.append(Request(key(i), prompt(4 + i, i), 14, drafter, sampling, chunk=5))
    run_all(worker, {0: requests[:5], 3: requests[5:]})
    for request in requests:
        assert request.output[:14] == plain(reference, request.prompt, 14)
        assert all(verdict.q_gap < 1e-6 for verdict in request.verdicts)


def test_sampled_text_is_a_function_of_nonce_and_step_alone(target, shared, worker) -> None:
    def sample(
        worker: TargetWorker, nonce: int, first_step: int, batch_mates: int = 0
    ) -> list[int]:
        nonces = [nonce, *range(1000, 1000 + batch_mates)]
        requests = [
            Request(key(first_step + i), prompt(5, i), 12, sampling=SamplingParams(nonce=n))
            for i, n in enumerate(nonces)
        ]
        run_all(worker, {first_step: requests}, first_step)
        return requests[0].output

    text = sample(worker, 11, 0)
    assert text == sample(target_worker(target, shared), 11, 0, batch_mates=3)
    assert text != sample(worker, 12, 100)
    assert text != sample(worker, 11, 200)


def test_a_wrong_q_shows_in_the_gap(shared, worker) -> None:
    sampling = SamplingParams(temperature=1.0, nonce=3)
    request = Request(key(1), prompt(5, 0), 40, sampling=sampling)
    run_step(worker, [request], 0)
    gaps = []
    for step in range(1, 9):
        draft = sampled_draft(shared, key(1), request.tokens[-1], 2, sampling, step)
        assert draft.q is not None
        inflated = replace(draft, q=draft.q + 0.01)
        request.draft = lambda tokens, step, draft=inflated: draft
        run_step(worker, [request], step)
        if request.verdicts[-1].accepted < 2:
            gaps.append(request.verdicts[-1].q_gap)
    assert gaps == pytest.approx([0.01] * len(gaps), abs=1e-5)
    assert gaps


def test_sampling_needs_q_and_a_drafter(target, worker) -> None:
    sampling = SamplingParams(temperature=1.0)
    open_sampled = VerifyRow(key(1), 2, 9, OpenSequence((1, 2), sampling, 20))
    bare = VerifyRow(key(1), 3, 9, draft=greedy_draft(key(1), [4]))
    worker.verify(VerifyBatch(0, (open_sampled,)))
    with pytest.raises(InvalidRequestError, match="lacks q"):
        worker.verify(VerifyBatch(1, (bare,)))


# --- handshake and profile --------------------------------------------------------------------


def test_info_describes_what_is_served(shared, worker) -> None:
    info = worker.info
    assert (info.vocab_size, info.block_size, info.num_blocks) == (VOCAB, 4, 128)
    assert info.max_context == 512
    assert info.fusion_digest == shared.digest
    assert (info.device, info.precision) == ("cpu", "fp32")
    assert len(info.head_digest) == 64


def test_profile_times_steps_and_frees_its_blocks(reference, worker) -> None:
    request = Request(key(1), prompt(9, 6), 20)
    run_step(worker, [request], 0)
    free = worker.num_free_blocks
    shapes = [ProfileShape(1, 1, 1, 20), ProfileShape(64, 16, 4, 40), ProfileShape(8, 0, 1, 0)]
    seconds = worker.profile(shapes, repeats=2)
    assert len(seconds) == 3
    assert all(value > 0 for value in seconds)
    assert worker.num_free_blocks == free
    with pytest.raises(InvalidRequestError):
        worker.profile([ProfileShape(2, 1, 3, 10)], 1)
    run_step(worker, [request], 1)
    assert request.output == plain(reference, request.prompt, 2)
