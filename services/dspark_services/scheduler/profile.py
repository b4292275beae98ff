"""The cost surface of a deployment, measured through the ports in seconds."""

from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from dspark.core.cost import StepCost
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
from dspark.engine.ports import DrafterPort, VerifierPort
from dspark_services.process import new_incarnation

_BATCH_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
_REQUESTS = (1, 4, 16, 32)
_CONTEXT = 128  # tokens a request attends to while batch sizes are timed
_VARIED_BATCH = 16  # the batch size at which head rows and context are varied
_LONG_CONTEXT = 512
_REPEATS = 3
_PROMPT = 64  # tokens of the dummy sequences that drafts are timed with
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Workers:
    """Both ends of the ports, and who answered there."""

    verifier: VerifierPort
    target: TargetInfo
    drafter: DrafterPort | None
    drafter_info: DrafterInfo | None


async def measure(workers: Workers) -> StepCost:
    """Time target steps of several shapes and, with a drafter, drafts for several batch sizes."""
    shapes = _shapes(workers.target)
    seconds = await workers.verifier.profile(shapes, _REPEATS)
    features, overhead = await run_dummy(workers)
    drafts = []
    if workers.drafter is not None and workers.drafter_info is not None:
        block_size = workers.drafter_info.block_size
        drafts = await time_drafts(workers.drafter, block_size, features)
    return StepCost.from_profile(
        list(zip(shapes, seconds, strict=True)), drafts, overhead_seconds=overhead
    )


def _shapes(target: TargetInfo) -> list[ProfileShape]:
    """Batch sizes with a head row each, then one size with fewer head rows and longer contexts."""

    def shape(batch_tokens: int, *, head_rows: int, context: int) -> ProfileShape:
        requests = min(batch_tokens, 8)
        # A small cache bounds the contexts that can be timed.
        room = target.num_blocks // requests * target.block_size
        context = min(context, target.max_context, room)
        return ProfileShape(batch_tokens, head_rows, requests, context)

    capacity = target.num_blocks * target.block_size
    sizes = [size for size in _BATCH_TOKENS if size <= capacity // 2]
    shapes = [shape(size, head_rows=size, context=_CONTEXT) for size in sizes]
    varied = min(_VARIED_BATCH, sizes[-1])
    return [
        *shapes,
        shape(varied, head_rows=1, context=_CONTEXT),
        shape(varied, head_rows=varied, context=_LONG_CONTEXT),
    ]


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
    block_size: int,
    features: bytes,
    turn: AbstractAsyncContextManager[None] | None = None,
) -> list[tuple[int, float]]:
    """Median seconds of a draft for each number of requests, opening them not counted.

    ``features`` are those of `run_dummy`. ``turn`` is taken for every call: a target that serves
    meanwhile waits for one draft at a time, and the draft for no target step.
    """
    turn = turn or nullcontext()

    async def timed(batch: DraftBatch) -> float:
        async with turn:
            started = perf_counter()
            await drafter.draft(batch)
            return perf_counter() - started

    incarnation = new_incarnation()
    one_row = features[: len(features) // _PROMPT]
    times: list[tuple[int, float]] = []
    step = 0
    for requests in _REQUESTS:
        keys = tuple(SequenceKey(incarnation, index) for index in range(requests))
        opening = [DraftRow(key, 0, [0] * (_PROMPT + 1), features, 0, _GREEDY) for key in keys]
        await timed(DraftBatch(step := step + 1, tuple(opening)))
        seconds = []
        for length in range(_PROMPT + 1, _PROMPT + 1 + _REPEATS):
            rows = [DraftRow(key, length, [0], one_row, block_size, _GREEDY) for key in keys]
            seconds.append(await timed(DraftBatch(step := step + 1, tuple(rows))))
        await timed(DraftBatch(step := step + 1, (), close=keys))
        times.append((requests, median(seconds)))
    return times
