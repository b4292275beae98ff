"""What a decoding round takes: a draft, and the target's pass over what was drafted."""

import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch

from dspark.core.statistics import lower_quartile
from dspark.core.types import DraftBatch, DraftRow, ProfileShape, SamplingParams, SequenceKey
from dspark.modeling.backbone import LocalBackbone
from dspark.modeling.draft_worker import DraftWorker
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.drafters.shared import SharedDraftParts
from dspark.modeling.head import LocalHead
from dspark.modeling.kv import BlockPool
from dspark.modeling.linear import resolve_precision
from dspark.modeling.profile import profile_steps

_CONTEXT = 256  # tokens of each sequence
_NEW_TOKENS = 3  # that a sequence brings to each draft
_REPEATS = 30
_KV_BLOCK = 16


def draft_milliseconds(model: Drafter, batches: Sequence[int]) -> dict[int, float]:
    """Milliseconds (lower quartile) of a greedy draft of whole blocks, by number of sequences. The
    drafter is taken over: its layers change to the precision's dtype."""
    worker = DraftWorker(
        model,
        name="timed",
        incarnation=1,
        target_digest="",
        precision=resolve_precision("auto"),
    )
    config = model.config
    rng = np.random.default_rng(0)

    def row(number: int, base: int, count: int) -> DraftRow:
        features = torch.randn(base + count - max(base, 1), config.hidden_size)
        packed = features.to(SharedDraftParts.wire_dtype).view(torch.int16).numpy().tobytes()
        tokens = rng.integers(config.vocab_size, size=count).tolist()
        greedy = SamplingParams(temperature=0.0)
        return DraftRow(SequenceKey(1, number), base, tokens, packed, config.block_size, greedy)

    found = {}
    for batch in batches:
        worker.draft(DraftBatch(0, tuple(row(number, 0, _CONTEXT) for number in range(batch))))
        times = []
        for repeat in range(_REPEATS):
            base = _CONTEXT + repeat * _NEW_TOKENS
            rows = tuple(row(number, base, _NEW_TOKENS) for number in range(batch))
            started = time.perf_counter()
            worker.draft(DraftBatch(repeat + 1, rows))
            times.append(time.perf_counter() - started)
        found[batch] = 1e3 * lower_quartile(times)
    return found


def target_milliseconds(
    folder: Path, drafts: Iterable[int], batches: Sequence[int]
) -> dict[tuple[int, int], float]:
    """Milliseconds (lower quartile) of the target's pass over an anchor and so many drafts of each
    sequence, by (drafts, number of sequences). All of them take turns.

    Raises:
        TargetError: the checkpoint in ``folder`` cannot be loaded.
    """
    pairs = list(product(sorted(set(drafts)), batches))
    context = _CONTEXT + 1 + max(width for width, _ in pairs)
    precision = resolve_precision("auto")
    num_blocks = max(batches) * -(-context // _KV_BLOCK)
    backbone = LocalBackbone(folder, precision, (), num_blocks, _KV_BLOCK)
    shapes = [
        ProfileShape(batch * (width + 1), batch * (width + 1), batch, _CONTEXT + width + 1)
        for width, batch in pairs
    ]
    seconds = profile_steps(
        backbone,
        LocalHead.from_folder(folder, precision),
        BlockPool(num_blocks, _KV_BLOCK),
        shapes,
        _REPEATS,
    )
    return {pair: 1e3 * own for pair, own in zip(pairs, seconds, strict=True)}
