"""Prompt lookup in the engine: when it drafts, what it learns, what the drafter is told."""

from random import Random

import numpy as np
import pytest

from dspark.core.planner import CapacityPlanner, FixedPlanner, NonePlanner
from dspark.core.types import DraftSource, SamplingParams, SequenceKey, VerificationMode
from dspark.engine.events import GateState
from dspark.engine.promise import UNKNOWN, Promise
from dspark.engine.repeats import BLOCK_SIZE, Repeats
from dspark.engine.sequence import Sequence
from tests.support.world import (
    GREEDY,
    World,
    endless_target,
    hashed_target,
    plain_decoding,
    request,
    scripted_target,
)

MODEL, NGRAM = DraftSource.MODEL, DraftSource.NGRAM
SAMPLED = SamplingParams(temperature=1.0, nonce=5)
PERIODIC = scripted_target(1, [1, 2, 3] * 40)


def sequence(
    prompt: list[int], output: list[int], sampling: SamplingParams = GREEDY
) -> tuple[Repeats, Sequence]:
    """One whose prompt was processed and whose output was committed token by token."""
    own = Sequence(SequenceKey(1, 1), request(prompt, 1000, sampling=sampling), 2000)
    repeats = Repeats()
    own.computed_len = len(prompt)
    repeats.follow(own)
    for token in output:
        own.commit([token])
        repeats.follow(own)
    return repeats, own


def test_what_followed_before_is_drafted_with_rising_confidence() -> None:
    repeats, own = sequence([0, 1, 2, 3, 4, 5, 6], [7, 2, 3, 4])
    found = repeats.draft(own, 100)
    assert found is not None
    draft, expected = found
    assert draft.tokens.tolist() == [5, 6, 7, 2, 3, 4] * 2 + [5, 6, 7, 2]
    assert len(draft.tokens) == len(draft.confidence_logits) == BLOCK_SIZE
    assert (np.diff(draft.confidence_logits) >= 0).all()
    survival = np.cumprod(1 / (1 + np.exp(-draft.confidence_logits.astype(float))))
    assert expected == pytest.approx(survival.sum(), rel=1e-4)
    short = repeats.draft(own, 2)
    assert short is not None
    assert short[0].tokens.tolist() == [5, 6]
    assert short[1] == pytest.approx(survival[:2].sum(), rel=1e-4)


def test_a_prompt_whose_last_token_is_left_is_matched_up_to_that_token() -> None:
    own = Sequence(SequenceKey(1, 1), request([1, 2, 3, 1, 2], 100), 2000)
    repeats = Repeats()
    own.computed_len = 4  # a prefill chunk ended here: token 2 is the anchor
    repeats.follow(own)
    found = repeats.draft(own, 3)
    assert found is not None
    assert found[0].tokens.tolist() == [3, 1, 2]


def test_a_new_word_is_not_drafted() -> None:
    repeats, own = sequence([0, 1, 2], [3])
    assert repeats.draft(own, 4) is None


@pytest.mark.parametrize("right", [True, False])
def test_confidence_follows_what_the_text_did(right: bool) -> None:
    """It went round and round; or nothing followed from anything."""
    fresh, likewise = sequence([1, 2, 3, 4], [1, 2])
    before = fresh.draft(likewise, 1)
    rng = Random(0)
    text = [1, 2, 3, 4] * 50 if right else [rng.randint(1, 11) for _ in range(200)]
    output = [*text, 1, 2]
    repeats, own = sequence([1, 2, 3, 4], output)
    after = repeats.draft(own, 1)
    assert before is not None
    assert after is not None
    if right:
        assert after[1] > before[1] + 0.1
    else:
        assert after[1] < before[1]


def test_occurrences_that_went_on_differently_are_believed_less() -> None:
    """Behind 1 and 2 came 3 or 4, behind 5 and 6 always 7; what stood before them was chance."""
    rng, output = Random(0), []
    for _ in range(400):
        output += [rng.randint(8, 11), 1, 2, rng.randint(3, 4), rng.randint(8, 11), 5, 6, 7]
    output += [9, 1, 2, 3, 9, 1, 2, 4]
    found = {}
    for end in ([9, 1, 2], [9, 5, 6]):
        repeats, own = sequence([8], output + end)
        found[end[-1]] = repeats.draft(own, 1)
    split, agreed = found[2], found[6]
    assert split is not None
    assert agreed is not None
    assert split[1] < 0.4 < 0.7 < agreed[1]


def test_about_as_many_tokens_are_promised_as_are_kept() -> None:
    """In a text of phrases whose order is chance: what is left of a phrase repeats itself. The
    promise takes one right token for as good a sign as the next, which it is not quite."""
    rng, output = Random(1), []
    phrases = [[rng.randint(0, 11) for _ in range(rng.randint(3, 12))] for _ in range(6)]
    while len(output) < 3000:
        output += rng.choice(phrases)
    repeats, own = sequence([8], output[:2000])
    promised, kept = [], []
    for place in range(2000, 2900):
        found = repeats.draft(own, BLOCK_SIZE)
        if found is not None:
            right = np.array(output[place : place + BLOCK_SIZE]) == found[0].tokens
            promised.append(found[1])
            kept.append(np.logical_and.accumulate(right).sum())
        own.commit([output[place]])
        repeats.follow(own)
    assert len(kept) > 500
    assert np.mean(promised) == pytest.approx(np.mean(kept), rel=0.3)


def test_each_mode_has_its_own_experience() -> None:
    repeats, own = sequence([1, 2, 3, 4], [1, 2, 3, 4] * 30 + [1, 2])
    likewise = Sequence(SequenceKey(1, 2), request([1, 2, 3, 4, 1, 2], sampling=SAMPLED), 100)
    likewise.computed_len = 6
    repeats.follow(likewise)
    greedy, sampled = repeats.draft(own, 1), repeats.draft(likewise, 1)
    assert greedy is not None
    assert sampled is not None
    assert greedy[1] > sampled[1]
    assert (sampled[0].source, sampled[0].q, sampled[0].hidden) == (NGRAM, None, b"")


def test_the_prompt_teaches_nothing_but_what_it_says() -> None:
    repeats, own = sequence([1, 2, 3] * 50, [])
    fresh, likewise = sequence([1, 2, 3] * 6, [])
    found, expected = repeats.draft(own, 4), fresh.draft(likewise, 4)
    assert found is not None
    assert expected is not None
    assert found[1] == expected[1]


@pytest.mark.parametrize("planner", [FixedPlanner(4), CapacityPlanner()], ids=lambda p: p.name)
@pytest.mark.parametrize("target", [PERIODIC, hashed_target, endless_target])
def test_without_a_drafter_the_output_is_the_targets_own(planner, target) -> None:
    world = World(planner=planner, target=target, lookup=True)
    world.engine.attach_drafter(None)
    wanted = request([0], max_tokens=40)
    assert world.decode(wanted) == plain_decoding(target, wanted)
    assert world.drafter.calls == 0
    drafted = sum(outcome.stats.proposed for outcome in world.outcomes)
    assert drafted == sum(o.stats.proposed_by_source.get(NGRAM, 0) for o in world.outcomes)
    if target is PERIODIC:
        assert len(world.outcomes) < 20


def test_a_drafter_that_was_not_asked_for_a_while_is_told_everything() -> None:
    """The toy drafter checks the features it is given; the text repeats itself, then does not."""
    output = [1, 2, 3, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 8]
    world = World(planner=FixedPlanner(4), target=scripted_target(1, output), lookup=True)
    wanted = request([0], max_tokens=12)
    assert world.decode(wanted) == plain_decoding(scripted_target(1, output), wanted)
    by_source = [dict(outcome.stats.proposed_by_source) for outcome in world.outcomes]
    sources = [next(iter(own)) for own in by_source if own]
    assert {MODEL, NGRAM} == set(sources)
    assert sources[-1] is MODEL
    assert sources.index(NGRAM) < len(sources) - 1
    assert all(outcome.stats.resynced == 0 for outcome in world.outcomes)


def test_the_drafter_is_not_asked_for_what_was_looked_up() -> None:
    world = World(planner=FixedPlanner(4), target=PERIODIC, lookup=True)
    world.engine.add(request([0], max_tokens=60))
    for _ in range(6):
        world.step()
    calls = world.drafter.calls
    stats = world.step().stats
    assert world.drafter.calls == calls
    assert dict(stats.proposed_by_source) == {NGRAM: 4}
    assert stats.accepted == 4


def test_the_source_is_chosen_before_anything_is_drawn() -> None:
    """By committed tokens and history: whatever the drafter says, the same rows are its own."""
    chosen = []
    for seed in range(6):
        world = World(planner=FixedPlanner(4), target=PERIODIC, lookup=True, seed=seed)
        world.drafter.accuracy = 0.0  # no draft of it is kept, so all worlds commit the same
        for prompt in ([0], [0, 5, 7, 5, 7]):
            world.engine.add(request(prompt, 30, sampling=SAMPLED))
        rows = []
        for _ in range(4):
            world.engine.begin()
            batch = world.engine.draft_batch()
            rows.append([row.key.sequence for row in batch.rows] if batch else [])
            reply = None if batch is None else world.drafter.draft(batch)
            world.verify_and_commit(world.engine.plan(reply))
        chosen.append(rows)
    assert all(rows == chosen[0] for rows in chosen)


def test_a_planner_that_never_drafts_has_nothing_looked_up() -> None:
    world = World(planner=NonePlanner(), target=PERIODIC, lookup=True)
    world.decode(request([0], max_tokens=30))
    assert world.engine.gate.state is GateState.OFF
    assert not any(outcome.stats.proposed for outcome in world.outcomes)


def test_lookups_are_judged_as_a_stream_of_their_own() -> None:
    world = World(planner=FixedPlanner(4), target=endless_target, lookup=True)
    for seed in range(4):
        world.engine.add(request([seed], max_tokens=60))
    world.run()
    assert set(world.engine.calibration) == {
        (VerificationMode.GREEDY, MODEL),
        (VerificationMode.GREEDY, NGRAM),
    }


def test_a_promise_is_the_mean_of_recent_survivals() -> None:
    promise, greedy, sampled = Promise(2), VerificationMode.GREEDY, VerificationMode.REJECTION
    assert promise.tokens(greedy, 2) == pytest.approx(UNKNOWN + UNKNOWN**2)
    for _ in range(30):
        promise.record([greedy] * 50, np.tile([0.9, 0.4], (50, 1)), np.full(50, 2))
    assert promise.tokens(greedy, 2) == pytest.approx(1.3, abs=0.01)
    assert promise.tokens(greedy, 1) == pytest.approx(0.9, abs=0.01)
    assert promise.tokens(sampled, 1) == UNKNOWN
    for _ in range(30):  # blocks that the end of an answer cut short say nothing of what was cut
        promise.record([greedy] * 50, np.tile([0.5, 0.0], (50, 1)), np.full(50, 1))
    assert promise.tokens(greedy, 2) == pytest.approx(0.9, abs=0.01)
    assert promise.tokens(sampled, 0) == Promise(0).tokens(greedy, 4) == 0.0
