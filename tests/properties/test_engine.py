"""Whatever happens around it, a request yields what plain decoding yields, once, and leaves
nothing behind."""

from copy import deepcopy
from itertools import accumulate
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import (
    CapacityPlanner,
    CausalPlanner,
    FixedPlanner,
    Lengths,
    NonePlanner,
    Planner,
    StepLoad,
    ThresholdPlanner,
)
from dspark.core.survival import CurrentScores, DeterminedScores
from dspark.core.types import DraftReply, DraftSource, Floats, Ints, SamplingParams, VerifyBatch
from dspark.engine.admission import Limits
from dspark.engine.request import Request
from tests.support.world import (
    GREEDY,
    VOCAB,
    World,
    block,
    draft_length,
    endless_target,
    hashed_target,
    plain_decoding,
    request,
    step_cost,
    target_info,
)

MAX_CONTEXT = 40
SAMPLED = SamplingParams(temperature=1.0)
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
    lambda per_token, per_draft, num_blocks, **options: World(
        cost=step_cost(per_token, per_draft),
        info=target_info(max_context=MAX_CONTEXT, num_blocks=num_blocks),
        **options,
    ),
    seed=st.integers(0, 2**32),
    accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    planner=st.sampled_from(
        [CausalPlanner(), CapacityPlanner(), ThresholdPlanner(0.5), FixedPlanner(3), NonePlanner()]
    ),
    per_token=st.sampled_from([0.0, 0.05, 0.3]),
    per_draft=st.sampled_from([0.0, 0.5]),
    limits=st.builds(
        Limits,
        max_running=st.integers(1, 5),
        max_prefill_tokens=st.sampled_from([1, 3, 64]),
        max_batch_tokens=st.sampled_from([4, 64]),
    ),
    num_blocks=st.sampled_from([10, 25]),
    cap_accept_every=st.sampled_from([0, 1, 3]),
    lookup=st.booleans(),
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
        self.check_plan(reply, verify)
        if fault == "cancel while verifying":
            self.cancel()
        if fault == "verifier lost":
            world.verifier.verify(verify)
            world.verifier.sequences.clear()
            engine.verifier_lost()
            return
        world.verify_and_commit(verify)

    def check_plan(self, reply: DraftReply | None, batch: VerifyBatch) -> None:
        """Plans are prefixes of what was drafted or looked up, and there is room for them."""
        drafted = {draft.key: draft.tokens.tolist() for draft in (reply.drafts if reply else ())}
        for row in batch.rows:
            if row.draft is not None:
                tokens = row.draft.tokens.tolist()
                if row.draft.source is DraftSource.MODEL:
                    assert tokens == drafted[row.key][: len(tokens)]
                else:
                    assert row.key not in drafted
                    assert repeats(self.engine._running[row.key].tokens, tokens)
        base = sum(row.num_pending for row in batch.rows)
        admitted = sum(draft_length(row) for row in batch.rows)
        assert admitted == 0 or base + admitted <= self.world.limits.max_batch_tokens

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


def repeats(text: list[int], tokens: list[int]) -> bool:
    """Whether these tokens follow the last one as they, or their beginning, did before."""
    whole = text + tokens
    return any(
        text[-1] == text[place - 1] and whole[place : place + len(tokens)] == tokens
        for place in range(1, len(text))
    )


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


class Rehearsed:
    """A world some steps in: greedy and sampling rows, a newcomer at the end of its prefill, the
    gate in whatever state the past brought it to; its next step drafts."""

    def __init__(self, planner: Planner, seed: int) -> None:
        rng = Random(seed)
        jumps = [rng.choice((0.0, 0.05, 0.6)) for _ in range(80)]
        lookup = rng.random() < 0.5  # where it is on, the text must not repeat itself all the time
        self.world = World(
            seed=seed,
            accuracy=rng.choice((0.0, 0.3, 0.6, 0.9)),
            planner=planner,
            cost=StepCost(
                tokens=Curve(tuple(range(80)), tuple(accumulate(jumps, initial=1.0))[:80]),
                draft=Curve((0, 8), (0.0, rng.choice((0.0, 0.5)))),
            ),
            target=endless_target if lookup else lambda prefix: 0,
            lookup=lookup,
            limits=Limits(max_batch_tokens=rng.choice((8, 64))),
            info=target_info(max_context=1000, num_blocks=5000),
            cap_accept_every=rng.choice((0, 1, 2)),
        )
        self._add(SAMPLED)
        for _ in range(rng.randrange(3)):
            self._add(rng.choice((GREEDY, SAMPLED)))
        for _ in range(rng.choice((1, 3, 20))):
            self.world.step()
        self._add(rng.choice((GREEDY, SAMPLED)))
        while (reply := self.world.begin_and_draft()) is None:
            self.world.verify_and_commit(self.world.engine.plan(None))
        self.reply = reply

    def _add(self, sampling: SamplingParams) -> None:
        self.world.engine.add(request([0], 900, sampling=sampling))

    def admitted(self, tokens: Ints, logits: Floats) -> list[int]:
        """Draft tokens that would be verified of each drafting row, if these [rows, 4] came."""
        drafts = tuple(
            block(
                draft.key,
                tokens[i, : len(draft.tokens)].tolist(),
                logits[i, : len(draft.tokens)].tolist(),
                mode=(GREEDY if draft.q is None else SAMPLED).mode,
            )
            for i, draft in enumerate(self.reply.drafts)
        )
        batch = deepcopy(self.world.engine).plan(DraftReply(self.reply.step, drafts, 0.0))
        lengths = {row.key: draft_length(row) for row in batch.rows}
        return [lengths[draft.key] for draft in drafts]

    def looks_ahead(self, rng: np.random.Generator) -> bool:
        """Over the whole of `plan`: whether admitting token k of a sampling row hangs on that
        token, or on what follows. It would bias the output."""
        rows = len(self.reply.drafts)
        sampling = [i for i, draft in enumerate(self.reply.drafts) if draft.q is not None]
        if not sampling:
            return False
        row, k = rng.choice(sampling), rng.integers(3)
        tokens, logits = rng.integers(0, VOCAB, (rows, 4)), rng.normal(1.0, 2.0, (rows, 4))
        before = self.admitted(tokens, logits)[row]
        # Confidence k is computed from the tokens before k: token k is the first that changes, and
        # every confidence behind it may change with it.
        tokens[row, k:] = rng.integers(0, VOCAB, 4 - k)
        logits[row, k + 1 :] = rng.normal(0.0, 4.0, 3 - k)
        after = self.admitted(tokens, logits)[row]
        return bool(min(before, k + 1) != min(after, k + 1))


def looks_ahead(planner: Planner, seed: int) -> bool:
    """Whether any of some drafts shows the planner to look ahead."""
    rehearsed, rng = Rehearsed(planner, seed), np.random.default_rng(seed)
    return any(rehearsed.looks_ahead(rng) for _ in range(20))


@pytest.mark.parametrize(
    "planner", [ThresholdPlanner(0.5), CausalPlanner(), CapacityPlanner()], ids=lambda p: p.name
)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_admission_of_a_token_ignores_that_token_and_what_follows(
    planner: Planner, seed: int
) -> None:
    assert not looks_ahead(planner, seed)


def test_a_planner_that_looks_ahead_is_seen() -> None:
    class Leaking(CapacityPlanner):
        def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
            return super().plan(DeterminedScores(scores.survival), load, cost)

    assert any(looks_ahead(Leaking(), seed) for seed in range(40))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), accuracy=st.sampled_from([0.0, 0.6, 1.0]))
def test_counters_add_up(seed: int, accuracy: float) -> None:
    rng = Random(seed)
    world = World(seed=seed, accuracy=accuracy, planner=FixedPlanner(3), lookup=seed % 2 == 0)
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
        assert sum(s.proposed_by_source.values()) == s.proposed
        assert sum(s.accepted_by_source.values()) == s.accepted
        assert s.trimmed == s.proposed - s.admitted == sum(s.trimmed_by_position)
        assert np.all(np.diff(s.accepted_by_position) <= 0)
