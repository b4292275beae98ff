"""The cost surface of a deployment: measured through the ports in seconds, kept in the store."""

import logging
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from dspark.core.cost import ProfileKey, StepCost
from dspark.core.errors import ConfigError
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
from dspark.ops.state import StateStore
from dspark_services.process import new_incarnation

log = logging.getLogger(__name__)

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

    def profile_key(self, threads: int) -> ProfileKey:
        return ProfileKey(
            target_digest=self.target.target_digest,
            drafter_digest=self.drafter_info.fusion_digest if self.drafter_info else "",
            device=self.target.device,
            precision=self.target.precision,
            threads=threads,
        )


async def cost_profile(workers: Workers, threads: int, store: StateStore) -> StepCost:
    """The cost surface: read from ``store`` if measured before under the same key, else measured.

    Raises:
        WorkerUnavailableError: a worker went away meanwhile.
    """
    key = workers.profile_key(threads)
    name = f"cost:{key.digest()}"
    cost = _parse(await store.get(name), key)
    if cost is None:
        log.info("measuring what steps cost on this machine (a few seconds)")
        started = perf_counter()
        cost = await measure(workers)
        log.info("cost profile measured", extra={"seconds": perf_counter() - started})
        await store.put(name, cost.to_json(key))
    return cost


async def measure(workers: Workers) -> StepCost:
    """Time target steps of several shapes and, with a drafter, drafts for several batch sizes."""
    shapes = _shapes(workers.target)
    seconds = await workers.verifier.profile(shapes, _REPEATS)
    features, overhead = await _run_dummy(workers)
    drafts = []
    if workers.drafter is not None and workers.drafter_info is not None:
        block_size = workers.drafter_info.block_size
        drafts = await _time_drafts(workers.drafter, block_size, features)
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


async def _run_dummy(workers: Workers) -> tuple[bytes, float]:
    """Decode a dummy prompt: its features, and the seconds the wire adds to a target step.

    Features are opaque here, so those that the drafts are timed with have to come from somewhere.
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


async def _time_drafts(
    drafter: DrafterPort, block_size: int, features: bytes
) -> list[tuple[int, float]]:
    """Median seconds of a draft for each number of requests, opening them not counted."""
    incarnation = new_incarnation()
    one_row = features[: len(features) // _PROMPT]
    times: list[tuple[int, float]] = []
    step = 0
    for requests in _REQUESTS:
        keys = tuple(SequenceKey(incarnation, index) for index in range(requests))
        opening = [DraftRow(key, 0, [0] * (_PROMPT + 1), features, 0, _GREEDY) for key in keys]
        await drafter.draft(DraftBatch(step := step + 1, tuple(opening)))
        seconds = []
        for length in range(_PROMPT + 1, _PROMPT + 1 + _REPEATS):
            rows = [DraftRow(key, length, [0], one_row, block_size, _GREEDY) for key in keys]
            started = perf_counter()
            await drafter.draft(DraftBatch(step := step + 1, tuple(rows)))
            seconds.append(perf_counter() - started)
        await drafter.draft(DraftBatch(step := step + 1, (), close=keys))
        times.append((requests, median(seconds)))
    return times


def _parse(text: str | None, key: ProfileKey) -> StepCost | None:
    if text is None:
        return None
    try:
        cost = StepCost.from_json(text, key)
    except ConfigError as error:
        log.warning("%s", error)
        return None
    log.info("cost profile found in the state store")
    return cost
