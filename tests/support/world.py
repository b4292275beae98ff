"""A toy world for the engine: a target that is a function of the prefix, a drafter that is
sometimes right, and workers that check every message against the contract of `core.types`."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from zlib import crc32

import numpy as np

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import CausalPlanner, Planner
from dspark.core.types import (
    Draft,
    DraftBatch,
    DrafterInfo,
    DraftReply,
    DraftRow,
    RowStatus,
    SamplingParams,
    SequenceKey,
    TargetInfo,
    Verdict,
    VerificationMode,
    VerifyBatch,
    VerifyReply,
    VerifyRow,
)
from dspark.engine.admission import Limits
from dspark.engine.engine import Engine
from dspark.engine.events import FeatureFetch, SequenceEvent, StepOutcome
from dspark.engine.request import FinishReason, Request

GREEDY = SamplingParams(temperature=0.0)
# Token i is these bytes; the last three together are one character, or incomplete ones.
PIECES = (b"a", b"b", b"c", b"ab", b"bc", b" ", b">", b"<", b"><", b"\xe2", b"\x82", b"\xac")
VOCAB = len(PIECES)
EOS = VOCAB  # the only token without text
VOCAB_SIZE = VOCAB + 1


class Utf8Detokenizer:
    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(PIECES[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def request(
    prompt: Sequence[int] = (0,),
    max_tokens: int = 8,
    *,
    stop: tuple[str, ...] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    sampling: SamplingParams = GREEDY,
) -> Request:
    return Request(
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        detokenizer=Utf8Detokenizer(),
        sampling=sampling,
        stop=stop,
        stop_token_ids=stop_token_ids,
        eos_ids=frozenset({EOS}),
    )


NextToken = Callable[[Sequence[int]], int]


def hashed_target(prefix: Sequence[int]) -> int:
    """A text without structure that ends, on average, after forty tokens."""
    value = crc32(bytes(prefix))
    return EOS if value % 40 == 0 else value // 40 % VOCAB


def endless_target(prefix: Sequence[int]) -> int:
    return crc32(bytes(prefix[-8:])) % VOCAB


def scripted_target(prompt_len: int, output: Sequence[int]) -> NextToken:
    """Says `output` after the prompt, then repeats its last token."""
    return lambda prefix: output[min(len(prefix) - prompt_len, len(output) - 1)]


@dataclass(frozen=True)
class Output:
    tokens: tuple[int, ...]
    text: str
    finish: FinishReason


def plain_decoding(target: NextToken, request: Request, max_context: int = 1 << 20) -> Output:
    """What a request must yield, computed the slow and obvious way."""
    tokens = list(request.prompt)
    output: list[int] = []

    def text(final: bool) -> str:
        decoder = getincrementaldecoder("utf-8")(errors="replace")
        return decoder.decode(b"".join(PIECES[t] for t in output if t in spoken), final=final)

    ending = request.eos_ids | request.stop_token_ids
    spoken = set(range(VOCAB)) - request.stop_token_ids
    while True:
        token = target(tokens)
        tokens.append(token)
        output.append(token)
        last = len(output) == request.max_tokens or len(tokens) == max_context
        full = text(final=token in ending or last)
        matches = [(full.find(s) + len(s), full.find(s)) for s in request.stop if full.find(s) >= 0]
        if matches:
            full = full[: min(matches)[1]]
        if matches or token in ending:
            return Output(tuple(output), full, FinishReason.STOP)
        if last:
            return Output(tuple(output), full, FinishReason.LENGTH)


def features(tokens: Sequence[int], start: int, stop: int) -> bytes:
    """Four bytes a position, which only this prefix can have."""
    return b"".join(crc32(bytes(tokens[: i + 1])).to_bytes(4, "little") for i in range(start, stop))


@dataclass
class _Held:
    tokens: list[int]
    max_len: int
    computed_len: int = 0


class ToyVerifier:
    """Keeps while draft = target. Asserts whatever the contract promises it."""

    def __init__(
        self, target: NextToken, info: TargetInfo, rng: Random, *, prefix_cache: bool = True
    ) -> None:
        self.target = target
        self.info = info
        self.rng = rng
        self.prefix_cache = prefix_cache
        self.sequences: dict[SequenceKey, _Held] = {}

    def verify(self, batch: VerifyBatch) -> VerifyReply:
        for key in batch.close:
            self.sequences.pop(key, None)
        verdicts = tuple(self._row(row) for row in batch.rows)
        blocks = sum(-(-held.max_len // self.info.block_size) for held in self.sequences.values())
        assert blocks <= self.info.num_blocks
        tokens = sum(row.num_pending + draft_length(row) for row in batch.rows)
        return VerifyReply(batch.step, verdicts, 0.1, 0.08, 0.02, tokens)

    def features(self, key: SequenceKey, start: int, stop: int) -> bytes:
        held = self.sequences[key]
        assert 0 <= start < stop <= held.computed_len
        return features(held.tokens, start, stop)

    def _row(self, row: VerifyRow) -> Verdict:
        first = cached = 0
        if row.open is not None:
            assert row.base_committed_len == len(row.open.tokens) < row.open.max_len
            held = self.sequences[row.key] = _Held(list(row.open.tokens), row.open.max_len)
            if self.prefix_cache:
                cached = held.computed_len = self.rng.randrange(len(held.tokens)) // 2
        elif row.key not in self.sequences:
            return Verdict(row.key, RowStatus.UNKNOWN, 0)
        else:
            held = self.sequences[row.key]
            first = held.computed_len
        assert row.base_committed_len == len(held.tokens)
        assert row.num_pending >= 1
        held.computed_len = min(held.computed_len + row.num_pending, len(held.tokens))
        accepted, next_token = 0, None
        if held.computed_len == len(held.tokens):
            accepted, next_token = self._judge(row, held)
            held.computed_len += accepted
        else:
            assert row.draft is None
        return Verdict(
            row.key,
            RowStatus.OK,
            held.computed_len,
            cached_len=cached,
            accepted=accepted,
            next_token=next_token,
            features=features(held.tokens, first, held.computed_len) if row.want_features else b"",
        )

    def _judge(self, row: VerifyRow, held: _Held) -> tuple[int, int]:
        draft = [] if row.draft is None else row.draft.tokens.tolist()
        if row.draft is not None:
            check_draft(row.draft)
        assert len(held.tokens) + len(draft) + 1 <= held.max_len
        accepted = 0
        for token in draft:
            if token != self.target(held.tokens):
                break
            held.tokens.append(token)
            accepted += 1
        held.tokens.append(self.target(held.tokens))
        return accepted, held.tokens[-1]


def draft_length(row: VerifyRow) -> int:
    return 0 if row.draft is None else len(row.draft.tokens)


def check_draft(draft: Draft) -> None:
    """Every part of a cut draft still belongs to its tokens."""
    assert len(draft.tokens) == len(draft.confidence_logits) > 0
    if draft.q is not None:
        assert draft.cut is not None
        assert len(draft.q) == len(draft.cut) == len(draft.tokens)
        assert draft.hidden == bytes(t for t in draft.tokens.tolist() for _ in range(2))


class ToyDrafter:
    """Right with a probability of its own, which its confidences know about."""

    def __init__(
        self, target: NextToken, rng: Random, *, accuracy: float = 0.7, block_size: int = 4
    ) -> None:
        self.target = target
        self.rng = rng
        self.accuracy = accuracy
        self.info = drafter_info(block_size, incarnation=rng.getrandbits(63))
        self.sequences: dict[SequenceKey, list[int]] = {}
        self.calls = 0

    def restart(self) -> None:
        self.info = drafter_info(self.info.block_size, incarnation=self.rng.getrandbits(63))
        self.sequences.clear()

    def draft(self, batch: DraftBatch) -> DraftReply:
        self.calls += 1
        for key in batch.close:
            self.sequences.pop(key, None)
        return DraftReply(batch.step, tuple(self._row(row) for row in batch.rows), 0.01)

    def _row(self, row: DraftRow) -> Draft:
        assert 1 <= row.num_draft <= self.info.block_size
        held = [] if row.base_committed_len == 0 else self.sequences.get(row.key, [])
        if len(held) != row.base_committed_len:
            return block(row.key, [], in_sync=False)
        tokens = held + list(row.tokens)
        assert row.features == features(tokens, max(len(held) - 1, 0), len(tokens) - 1)
        self.sequences[row.key] = list(tokens)
        drafted, logits = [], []
        for _ in range(row.num_draft):
            right = self.rng.random() < self.accuracy
            token = self.target(tokens)
            if not right:
                token = (token + self.rng.randint(1, VOCAB - 1)) % VOCAB
            tokens.append(token)
            drafted.append(token)
            logits.append(self.rng.gauss(2.0 if right else -1.0, 1.0))
        return block(row.key, drafted, logits, mode=row.sampling.mode)


def block(
    key: SequenceKey,
    tokens: Sequence[int],
    logits: Sequence[float] | None = None,
    *,
    in_sync: bool = True,
    mode: VerificationMode = VerificationMode.GREEDY,
) -> Draft:
    """A draft with everything `mode` needs."""
    count = len(tokens)
    sampled = mode is VerificationMode.REJECTION
    return Draft(
        key=key,
        tokens=np.array(tokens, np.int64),
        confidence_logits=np.array([3.0] * count if logits is None else logits, np.float32),
        in_sync=in_sync,
        q=np.full(count, 0.5, np.float32) if sampled else None,
        cut=np.full(count, -np.inf, np.float32) if sampled else None,
        hidden=bytes(t for t in tokens for _ in range(2)) if sampled else b"",
    )


def drafter_info(block_size: int = 4, incarnation: int = 1) -> DrafterInfo:
    return DrafterInfo(incarnation, "toy", "t", "f", block_size, "fp32", "cpu")


def target_info(*, max_context: int = 64, num_blocks: int = 64, block_size: int = 4) -> TargetInfo:
    return TargetInfo(
        incarnation=1,
        model_id="toy",
        target_digest="t",
        head_digest="h",
        fusion_digest="f",
        vocab_size=VOCAB_SIZE,
        max_context=max_context,
        num_blocks=num_blocks,
        block_size=block_size,
        precision="fp32",
        device="cpu",
    )


def step_cost(per_token: float = 0.01, per_draft: float = 0.01) -> StepCost:
    """One second a step, and so much more for every row and for every request that drafts."""
    return StepCost(
        tokens=Curve((0, 100), (1.0, 1.0 + 100 * per_token)),
        draft=Curve((0, 100), (0.0, 100 * per_draft)),
    )


@dataclass
class World:
    """One engine with its workers, driven without faults; tests reach in to add some."""

    target: NextToken = hashed_target
    seed: int = 0
    accuracy: float = 0.7
    block_size: int = 4
    planner: Planner = field(default_factory=CausalPlanner)
    cost: StepCost | None = field(default_factory=step_cost)
    limits: Limits = field(default_factory=Limits)
    info: TargetInfo = field(default_factory=target_info)
    cap_accept_every: int = 0
    lookup: bool = False

    def __post_init__(self) -> None:
        rng = Random(self.seed)
        self.verifier = ToyVerifier(self.target, self.info, rng)
        self.drafter = ToyDrafter(
            self.target, rng, accuracy=self.accuracy, block_size=self.block_size
        )
        self.engine = Engine(
            incarnation=7,
            target=self.info,
            planner=self.planner,
            cost=self.cost,
            limits=self.limits,
            cap_accept_every=self.cap_accept_every,
            lookup=self.lookup,
        )
        self.engine.attach_drafter(self.drafter.info)
        self.events: dict[SequenceKey, list[SequenceEvent]] = {}
        self.outcomes: list[StepOutcome] = []

    def begin_and_draft(self) -> DraftReply | None:
        start = self.engine.begin()
        assert start is not None
        self.answer(start.fetch)
        batch = self.engine.draft_batch()
        return None if batch is None else self.drafter.draft(batch)

    def answer(self, fetches: tuple[FeatureFetch, ...]) -> None:
        """Supply what the verifier has; it may just have forgotten the sequence."""
        for key, start, stop in ((fetch.key, fetch.start, fetch.stop) for fetch in fetches):
            if key in self.verifier.sequences:
                self.engine.supply(key, self.verifier.features(key, start, stop))

    def verify_and_commit(self, batch: VerifyBatch) -> StepOutcome:
        events = self.engine.commit(self.verifier.verify(batch))
        outcome = self.engine.account()
        assert outcome.events == events
        self.outcomes.append(outcome)
        for event in outcome.events:
            self.events.setdefault(event.key, []).append(event)
        return outcome

    def step(self) -> StepOutcome:
        return self.verify_and_commit(self.engine.plan(self.begin_and_draft()))

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is left to do, and nothing is left behind anywhere."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        assert self.engine.num_running == self.engine.num_waiting == 0
        assert self.engine.free_blocks == self.info.num_blocks
        assert not self.verifier.sequences

    def output(self, key: SequenceKey) -> Output:
        events = self.events[key]
        assert [event.finish is None for event in events] == [True] * (len(events) - 1) + [False]
        tokens = tuple(token for event in events for token in event.tokens)
        finish, usage = events[-1].finish, events[-1].usage
        assert finish is not None
        assert usage is not None
        assert usage.completion_tokens == len(tokens)
        assert usage.steps == len(events)
        return Output(tokens, "".join(event.text for event in events), finish)

    def decode(self, request: Request) -> Output:
        """Run one request alone, to its end."""
        key = self.engine.add(request)
        self.run()
        return self.output(key)
