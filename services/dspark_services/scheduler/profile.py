"""The cost surface of a deployment, measured through the ports in seconds."""

from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from dspark.core.cost import StepCost
from dspark.core.statistics import lower_quartile
from dspark.core.types import (
    DraftBatch,
    DrafterInfo,
    DraftRow,
    OpenSequence,
    ProfileShape,
    SamplingParams,
    SequenceKey,
    TargetInfo,
    VerifyBatch,
    VerifyRow,
)
from dspark.engine.admission import Limits
from dspark.engine.ports import DrafterPort, VerifierPort
from dspark_services.process import new_incarnation

_ALWAYS_TIMED = 64  # batch sizes up to this, however slow the device, all of them in turns
_TURNS_SECONDS, _MOST_TURNS = 3.0, 8  # as often as fits, since their differences make the plans
_SPARE_SECONDS = 6.0  # larger ones are timed until the next one would take longer than this
_MOST_REQUESTS = 8  # of a step that is timed
_CONTEXT = 128  # tokens a request attends to while batch sizes are timed
_LONG_CONTEXTS = {16: (512, 2048), 64: (512,)}  # by the batch sizes that are varied otherwise too
_REPEATS = 3
_LONG_STEP_SECONDS = 0.15  # one repeat of such a step is precise enough
_PROMPT = 64  # tokens of the dummy sequences that drafts are timed with
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Workers:
    """Both ends of the ports, and who answered there."""

    verifier: VerifierPort
    target: TargetInfo
    drafter: DrafterPort | None
    drafter_info: DrafterInfo | None


async def measure(workers: Workers, limits: Limits) -> StepCost:
    """Time target steps of all sizes that `limits` allow and, with a drafter, drafts.

    Raises:
        ConfigError: the KV cache is too small for steps of two sizes.
    """
    verify = await time_steps(workers.verifier, workers.target, limits)
    features, overhead = await run_dummy(workers)
    drafts = []
    if workers.drafter is not None and workers.drafter_info is not None:
        drafts = await time_drafts(workers.drafter, workers.drafter_info, limits, features)
    return StepCost.from_profile(verify, drafts, overhead_seconds=overhead)


async def time_steps(
    verifier: VerifierPort, target: TargetInfo, limits: Limits
) -> list[tuple[ProfileShape, float]]:
    """Seconds of target steps: sizes in powers of two with a head row for each token, some of them
    also with fewer head rows and with longer contexts.

    Where a device is slow the largest sizes are left out: there a step is all multiplication, and
    the curve goes on as straight as it was.
    """

    def shape(size: int, *, head_rows: int, context: int) -> ProfileShape:
        requests = min(size, _MOST_REQUESTS)
        # A small cache bounds the contexts that can be timed.
        room = target.num_blocks // requests * target.block_size
        context = max(min(context, target.max_context, room), -(-size // requests))
        return ProfileShape(size, head_rows, requests, context)

    deadline = perf_counter() + _SPARE_SECONDS
    sizes = _sizes(target, limits)
    shapes: list[ProfileShape] = []
    for size in (size for size in sizes if size <= _ALWAYS_TIMED):
        for context in _LONG_CONTEXTS.get(size, ()):
            shapes.append(shape(size, head_rows=size, context=context))
        if size in _LONG_CONTEXTS:
            shapes.append(shape(size, head_rows=1, context=_CONTEXT))
        shapes.append(shape(size, head_rows=size, context=_CONTEXT))
    a_turn = sum(await verifier.profile(shapes, 1))
    turns = min(max(int(_TURNS_SECONDS / a_turn), 1), _MOST_TURNS)
    timed = list(zip(shapes, await verifier.profile(shapes, turns), strict=True))
    for size in (size for size in sizes if size > _ALWAYS_TIMED):
        latest = timed[-1][1]  # of half the size
        if perf_counter() + 2 * 2 * latest > deadline:  # run twice
            break
        larger = shape(size, head_rows=size, context=_CONTEXT)
        repeats = 1 if latest >= _LONG_STEP_SECONDS else _REPEATS
        [seconds] = await verifier.profile([larger], repeats)
        timed.append((larger, seconds))
    return timed


def _sizes(target: TargetInfo, limits: Limits) -> list[int]:
    """Powers of two up to the first that no step exceeds, and to what half the cache holds."""
    wanted = max(limits.max_batch_tokens, limits.max_running + limits.max_prefill_tokens)
    largest = min(2 * wanted - 1, target.num_blocks * target.block_size // 2)
    return [1 << power for power in range(largest.bit_length())]


async def run_dummy(workers: Workers) -> tuple[bytes, float]:
    """Decode a dummy prompt: its features, and the seconds the wire adds to a target step.

    Features are opaque here, so those that the drafts are timed with have to come from somewhere.
    The verifier forgets all other sequences with this one, so it must not serve any yet.
    """
    verifier, key = workers.verifier, SequenceKey(new_incarnation(), 0)
    prompt = [index % workers.target.vocab_size for index in range(_PROMPT)]
    opening = OpenSequence(prompt, _GREEDY, max_len=_PROMPT + 1 + _REPEATS)
    row = VerifyRow(key, _PROMPT, _PROMPT, opening, want_features=True)
    opened = await verifier.verify(VerifyBatch(step=1, rows=(row,)))
    overheads = []
    for repeat in range(_REPEATS):
        batch = VerifyBatch(step=2 + repeat, rows=(VerifyRow(key, _PROMPT + 1 + repeat, 1),))
        started = perf_counter()
        reply = await verifier.verify(batch)
        overheads.append(perf_counter() - started - reply.seconds)
    await verifier.verify(VerifyBatch(step=2 + _REPEATS, rows=(), close=(key,)))
    return opened.verdicts[0].features, median(overheads)


async def time_drafts(
    drafter: DrafterPort,
    info: DrafterInfo,
    limits: Limits,
    features: bytes,
    turn: AbstractAsyncContextManager[None] | None = None,
) -> list[tuple[int, float]]:
    """Seconds of a draft for each number of requests, the lower quartile; they take turns, and
    opening them is not counted.

    ``features`` are those of `run_dummy`. ``turn`` is taken for every call: a target that serves
    meanwhile waits for one draft at a time, and the draft for no target step.
    """
    turn = turn or nullcontext()

    async def timed(batch: DraftBatch) -> float:
        async with turn:
            started = perf_counter()
            await drafter.draft(batch)
            return perf_counter() - started

    counts = _request_counts(limits.max_running)
    incarnation = new_incarnation()
    keys = [SequenceKey(incarnation, index) for index in range(counts[-1])]
    opening = [DraftRow(key, 0, [0] * (_PROMPT + 1), features, 0, _GREEDY) for key in keys]
    await timed(DraftBatch(1, tuple(opening)))
    one_row = features[: len(features) // _PROMPT]
    lengths = [_PROMPT + 1] * len(keys)
    times: dict[int, list[float]] = {requests: [] for requests in counts}
    for number, requests in enumerate(counts * (1 + _REPEATS)):
        rows = [
            DraftRow(key, length, [0], one_row, info.block_size, _GREEDY)
            for key, length in zip(keys[:requests], lengths, strict=False)
        ]
        seconds = await timed(DraftBatch(2 + number, tuple(rows)))
        lengths[:requests] = [length + 1 for length in lengths[:requests]]
        if number >= len(counts):  # first touches are not timed
            times[requests].append(seconds)
    await timed(DraftBatch(2 + len(counts) * (1 + _REPEATS), (), close=tuple(keys)))
    return [(requests, lower_quartile(own)) for requests, own in times.items()]


def _request_counts(most: int) -> list[int]:
    """1, 4, 16, ..., and where these end: two counts at least, for a curve."""
    counts = [1]
    while counts[-1] < most:
        counts.append(min(4 * counts[-1], most))
    return counts if len(counts) > 1 else [1, 2]
