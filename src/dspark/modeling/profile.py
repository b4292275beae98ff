"""What a target step costs on this device: real forwards of given shapes, timed."""

from collections.abc import Sequence
from time import perf_counter

import torch

from dspark.core.errors import InvalidRequestError
from dspark.core.statistics import lower_quartile
from dspark.core.types import ProfileShape
from dspark.modeling.backbone import Backbone, PackedStep, Span
from dspark.modeling.head import LocalHead
from dspark.modeling.kv import BlockPool


def profile_steps(
    backbone: Backbone,
    head: LocalHead,
    pool: BlockPool,
    shapes: Sequence[ProfileShape],
    repeats: int,
) -> list[float]:
    """Seconds of steps (backbone, head and argmax), one for each shape: the lower quartile of
    `repeats`, because whatever else the machine does only ever adds to a step.

    Shapes take turns, so that a machine that slows down meanwhile slows all of them, and their
    differences hold. Runs on scratch blocks of the pool, freed afterwards; what the cache held
    there is garbage.

    Raises:
        InvalidRequestError: a shape with more sequences or head rows than tokens, or none.
        OutOfBlocksError: the pool is too small, or too full, for a shape.
    """
    times: list[list[float]] = [[] for _ in shapes]
    for turn in range(max(repeats, 1) + 1):
        for shape, own in zip(shapes, times, strict=True):
            seconds = _seconds(backbone, head, pool, shape)
            if turn:  # first touches and kernel choices are not timed
                own.append(seconds)
    return [lower_quartile(own) for own in times]


def _seconds(backbone: Backbone, head: LocalHead, pool: BlockPool, shape: ProfileShape) -> float:
    if not (
        1 <= shape.requests <= shape.batch_tokens and 0 <= shape.head_rows <= shape.batch_tokens
    ):
        raise InvalidRequestError(f"{shape} is no target step: more sequences or head rows than B")
    per_request, extra = divmod(shape.batch_tokens, shape.requests)
    lengths = [per_request + (index < extra) for index in range(shape.requests)]
    contexts = [max(shape.context, length) for length in lengths]
    blocks: list[list[int]] = []
    try:
        for context in contexts:
            blocks.append(pool.allocate(-(-context // pool.block_size)))
        spans = tuple(
            Span(table, context - length, length)
            for table, context, length in zip(blocks, contexts, lengths, strict=True)
        )
        step = PackedStep(torch.zeros(shape.batch_tokens, dtype=torch.int64), spans)
        return _run(backbone, head, step, shape.head_rows)
    finally:
        for table in blocks:
            pool.free(table)


def _run(backbone: Backbone, head: LocalHead, step: PackedStep, head_rows: int) -> float:
    started = perf_counter()
    hidden = backbone.forward(step).hidden
    if head_rows:
        head.argmax(hidden[:head_rows])
    return perf_counter() - started
