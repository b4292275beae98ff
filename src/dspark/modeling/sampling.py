"""The sampling transform on whole batches of logits; `dspark.core.sampling` is its fp64 reference.

Target and drafter both sample through this module, so that p and q mean the same thing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.core.types import SamplingParams

_NUCLEUS_WIDTH = 1024
"""Largest logits looked at first for top-p; a row whose mass lies deeper is sorted in full."""

_CDF_BLOCK = 256
"""The inverse CDF first picks a block of this many weights, then scans only that one."""


def argmax(logits: Tensor) -> NDArray[np.int64]:
    """Largest entry of each row of [N, V]; of equal ones the lowest id."""
    best: NDArray[np.int64]
    if logits.device.type == "cpu":
        best = logits.numpy().argmax(-1)  # vectorised; torch's own is an order slower here
    else:
        best = logits.argmax(-1).cpu().numpy()
    return best


def probabilities(
    logits: Tensor, sampling: Sequence[SamplingParams], cut: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Temperature, then top-k, then top-p, then an fp32 softmax.

    logits: [N, V] fp32; one SamplingParams with temperature > 0 a row. Returns the probabilities
    [N, V] fp32 and the cuts [N] fp32: logits (after temperature) below its cut have probability 0,
    -inf where nothing was cut. Given ``cut``, that one is applied instead of looking for one.
    """
    temperature = [s.temperature for s in sampling]
    scaled = logits / torch.tensor(temperature, device=logits.device)[:, None]
    if cut is None:
        cut = find_cut(scaled, sampling)
    if not torch.isneginf(cut).all():
        scaled.masked_fill_(scaled < cut[:, None], -torch.inf)
    return torch.softmax(scaled, dim=-1), cut


def find_cut(scaled: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """The logit below which top-k and top-p remove tokens: [N, V] -> [N], -inf where none is.

    top-k keeps every logit that equals the k-th; top-p keeps the smallest set of the rest whose
    mass reaches p, and what ties with its last member. The cut lies midway between the last logit
    kept and the first removed, so that rounding in a recomputed row does not move a token across.
    """
    cut = scaled.new_full((len(sampling),), -torch.inf)
    vocab = scaled.shape[-1]
    rows = [i for i, s in enumerate(sampling) if 0 < s.top_k < vocab or s.top_p < 1]
    if not rows:
        return cut
    index = torch.tensor(rows, device=scaled.device)
    values = scaled.index_select(0, index)
    top_k = [min(sampling[i].top_k or vocab, vocab) for i in rows]
    top_p = torch.tensor([sampling[i].top_p for i in rows], device=scaled.device)
    width = min(vocab, max(k if k < vocab else _NUCLEUS_WIDTH for k in top_k))
    last_kept, reached = _last_kept(values, top_k, top_p, width)
    if not reached.all():
        deep = torch.nonzero(~reached)[:, 0]
        full, _ = _last_kept(values[deep], [top_k[i] for i in deep.tolist()], top_p[deep], vocab)
        last_kept[deep] = full
    removed = values.masked_fill(values >= last_kept[:, None], -torch.inf).amax(-1)
    middle = (last_kept + removed) / 2
    cut[index] = torch.where(middle > removed, middle, last_kept)
    cut[index[torch.isneginf(removed)]] = -torch.inf
    return cut


def _last_kept(
    values: Tensor, top_k: list[int], top_p: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Smallest logit kept of each row [N], from its `width` largest, and whether they sufficed."""
    vocab = values.shape[-1]
    largest = values.topk(width, dim=-1).values
    rank = torch.tensor([min(k, width) - 1 for k in top_k], device=values.device)
    kth = largest.gather(1, rank[:, None])
    unlimited = torch.tensor([k >= vocab for k in top_k], device=values.device)[:, None]
    kth = kth.masked_fill(unlimited, -torch.inf)
    top = largest[:, :1]
    weights = torch.exp(values - top).masked_fill_(values < kth, 0)
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64)
    cumulative = torch.exp(largest - top).cumsum(-1, dtype=torch.float64) / mass
    wanted = top_p.double()[:, None]
    position = (cumulative < wanted).sum(-1, keepdim=True)
    nucleus = largest.gather(1, position.clamp(max=width - 1))
    nucleus = nucleus.masked_fill(wanted >= 1, -torch.inf)
    reached = (position < width) | (wanted >= 1) | ~unlimited | (width == vocab)
    return torch.maximum(kth, nucleus)[:, 0], reached[:, 0]


def draw(weights: Tensor, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
    """Inverse CDF: one token a row from weights [N, V] >= 0 (any sum) and uniforms [N] in [0, 1).

    A token of weight 0 is never drawn. Sums are kept in fp64 across blocks.
    """
    count, vocab = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocab % _CDF_BLOCK))
    blocks = padded.view(count, -1, _CDF_BLOCK)
    u = torch.from_numpy(uniforms).to(weights.device)[:, None]
    cdf = blocks.sum(-1, dtype=torch.float32).double().cumsum(-1)
    target = u * cdf[:, -1:]
    chosen = _first_above(cdf, target)
    before = torch.where(chosen > 0, cdf.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    inner = blocks[torch.arange(count, device=weights.device), chosen[:, 0]].double().cumsum(-1)
    token = chosen * _CDF_BLOCK + _first_above(inner, target - before)
    return token[:, 0].cpu().numpy()


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """First index of each row whose cumulative sum exceeds the target, which rounding may push
    to (or, for a block, past) the total."""
    total = cdf[:, -1:]
    target = torch.minimum(target.clamp(min=0), torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True)
