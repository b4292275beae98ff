"""Whatever happens around it, a request yields what plain decoding yields, once, and leaves
nothing behind."""

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.planner import CausalPlanner, FixedPlanner, NonePlanner
from dspark.core.types import DraftReply, SamplingParams
from dspark.engine.admission import Limits
from dspark.engine.request import Request
from tests.support.world import (
    GREEDY,
    VOCAB,
    World,
    block,
    hashed_target,
    plain_decoding,
    request,
    step_cost,
    target_info,
)

MAX_CONTEXT = 40
FAULTS = (
    "none",
    "join",
    "join three",
    "cancel one",
    "cancel after drafting",
    "cancel while verifying",
    "drafter late",
    "drafter gone",
    "drafter back",
    "drafter restarts",
    "drafter forgets",
    "drafter talks rubbish",
    "features lost",
    "verifier lost",
    "verifier lost after drafting",
    "verifier forgets one",
)
STOPS = ((), (), ("bc", "><"), ("c<", "\u20ac", "ab>"), ("\ufffd",))

worlds = st.builds(
    lambda seed, accuracy, planner, per_token, per_draft, limits, num_blocks: World(
        seed=seed,
        accuracy=accuracy,
        planner=planner,
        cost=step_cost(per_token, per_draft),
        limits=limits,
        info=target_info(max_context=MAX_CONTEXT, num_blocks=num_blocks),
    ),
    seed=st.integers(0, 2**32),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    planner=st.sampled_from([CausalPlanner(), CausalPlanner(), FixedPlanner(3), NonePlanner()]),
    per_token=st.sampled_from([0.0, 0.05, 0.3]),
    per_draft=st.sampled_from([0.0, 0.5]),
    limits=st.builds(
        Limits,
        max_running=st.integers(1, 5),
        max_prefill_tokens=st.sampled_from([1, 3, 64]),
        max_batch_tokens=st.sampled_from([4, 64]),
    ),
    num_blocks=st.sampled_from([10, 25]),
)


def random_request(rng: Random) -> Request:
    stop_ids = frozenset({rng.randrange(VOCAB)}) if rng.random() < 0.2 else frozenset()
    return request(
        [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))],
        rng.randint(1, 40),
        stop=rng.choice(STOPS),
        stop_token_ids=stop_ids,
        sampling=rng.choice((GREEDY, SamplingParams(temperature=0.8))),
    )


class Scenario:
    """Drives a world one fault at a time."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.engine = world.engine
        self.rng = rng
        self.requests: dict = {}
        self.cancelled: set = set()

    def join(self, count: int = 1) -> None:
        for _ in range(count):
            added = random_request(self.rng)
            self.requests[self.engine.add(added)] = added

    def cancel(self) -> None:
        unfinished = [
            key
            for key in self.requests
            if key not in self.cancelled
            and not any(event.finish for event in self.world.events.get(key, []))
        ]
        if unfinished:
            key = self.rng.choice(unfinished)
            self.cancelled.add(key)
            self.engine.cancel(key)
            self.world.events.pop(key, None)

    def step(self, fault: str) -> None:
        world, engine = self.world, self.engine
        self.between_steps(fault)
        start = engine.begin()
        if start is None:
            return
        if fault != "features lost":
            world.answer(start.fetch)
        batch = engine.draft_batch()
        reply = None if batch is None else world.drafter.draft(batch)
        if fault == "verifier lost after drafting":
            world.verifier.sequences.clear()
            engine.verifier_lost()
            return
        if fault == "cancel after drafting":
            self.cancel()
        if fault == "drafter late":
            reply = None
        if fault == "drafter talks rubbish" and reply is not None:
            reply = self.rubbish(reply)
        verify = engine.plan(reply)
        if fault == "cancel while verifying":
            self.cancel()
        if fault == "verifier lost":
            world.verifier.verify(verify)
            world.verifier.sequences.clear()
            engine.verifier_lost()
            return
        world.verify_and_commit(verify)

    def between_steps(self, fault: str) -> None:
        world, engine = self.world, self.engine
        match fault:
            case "join":
                self.join()
            case "join three":
                self.join(3)
            case "cancel one":
                self.cancel()
            case "drafter gone":
                engine.attach_drafter(None)
            case "drafter back":
                engine.attach_drafter(world.drafter.info)
            case "drafter restarts":
                world.drafter.restart()
                engine.attach_drafter(world.drafter.info)
            case "drafter forgets":
                world.drafter.sequences.clear()
            case "verifier forgets one" if world.verifier.sequences:
                key = self.rng.choice(sorted(world.verifier.sequences))
                del world.verifier.sequences[key]

    def rubbish(self, reply: DraftReply) -> DraftReply:
        spoilt = tuple(
            self.rng.choice(
                (
                    block(draft.key, [VOCAB + 5] * len(draft.tokens)),
                    block(draft.key, [0] * 9),
                    block(draft.key, [1, 2], [float("nan"), 1.0]),
                    block(draft.key, []),
                )
            )
            for draft in reply.drafts
        )
        return DraftReply(reply.step, spoilt[1:], reply.seconds)  # and one is missing


@settings(max_examples=150, deadline=None)
@given(
    world=worlds,
    seed=st.integers(0, 2**32),
    faults=st.lists(st.sampled_from(FAULTS), max_size=40),
)
def test_output_is_plain_decoding_whatever_happens(
    world: World, seed: int, faults: list[str]
) -> None:
    scenario = Scenario(world, Random(seed))
    scenario.join(2)
    for fault in faults:
        scenario.step(fault)
    world.engine.attach_drafter(world.drafter.info)
    world.run()

    assert not world.drafter.sequences
    for key, wanted in scenario.requests.items():
        if key in scenario.cancelled:
            assert key not in world.events
        else:
            assert world.output(key) == plain_decoding(hashed_target, wanted, MAX_CONTEXT)
    for outcome in world.outcomes:
        stats = outcome.stats
        assert stats.accepted <= stats.admitted <= stats.proposed
        assert sum(stats.verified_lengths) == len(stats.verified_lengths) + stats.admitted


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    requests=st.integers(1, 4),
    per_token=st.sampled_from([0.02, 0.1, 0.3]),
    data=st.data(),
)
def test_admission_of_a_token_ignores_that_token_and_what_follows(
    seed: int, requests: int, per_token: float, data: st.DataObject
) -> None:
    """Over the whole of `plan`: the row that would make the output biased if it failed."""
    rng = Random(seed)
    row, position = rng.randrange(requests), rng.randrange(4)
    tokens = [[rng.randrange(VOCAB) for _ in range(4)] for _ in range(requests)]
    logits = [[rng.gauss(1.0, 2.0) for _ in range(4)] for _ in range(requests)]

    def admitted() -> list[int]:
        world = World(cost=step_cost(per_token, 0.0), target=lambda prefix: 0)
        for _ in range(requests):
            world.engine.add(request([0], 20, sampling=SamplingParams(temperature=1.0)))
        world.step()
        reply = world.begin_and_draft()
        assert reply is not None
        drafts = tuple(
            block(draft.key, t, c, mode=SamplingParams().mode)
            for draft, t, c in zip(reply.drafts, tokens, logits, strict=True)
        )
        batch = world.engine.plan(DraftReply(reply.step, drafts, 0.0))
        return [0 if r.draft is None else len(r.draft.tokens) for r in batch.rows]

    before = admitted()
    # Confidence k is computed from the tokens before k: position `position` is the first token to
    # change, and every later confidence may change with it.
    for k in range(position, 4):
        tokens[row][k] = data.draw(st.integers(0, VOCAB - 1))
        if k > position:
            logits[row][k] = data.draw(st.floats(-6, 6, width=32))
    after = admitted()
    assert min(before[row], position + 1) == min(after[row], position + 1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), accuracy=st.sampled_from([0.0, 0.6, 1.0]))
def test_counters_add_up(seed: int, accuracy: float) -> None:
    rng = Random(seed)
    world = World(seed=seed, accuracy=accuracy, planner=FixedPlanner(3))
    keys = [world.engine.add(random_request(rng)) for _ in range(4)]
    world.run()
    stats = [outcome.stats for outcome in world.outcomes]
    usages = [world.events[key][-1].usage for key in keys]
    for name in ("proposed", "admitted", "accepted"):
        assert sum(getattr(s, name) for s in stats) == sum(getattr(u, name) for u in usages)
    committed = sum(usage.completion_tokens for usage in usages)
    prefills = sum(s.rows - len(s.accepted_lengths) for s in stats)
    assert committed == prefills + sum(sum(s.accepted_lengths) for s in stats)
    for s in stats:
        assert s.trimmed == s.proposed - s.admitted == sum(s.trimmed_by_position)
        assert np.all(np.diff(s.accepted_by_position) <= 0)
