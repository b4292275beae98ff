"""The drafters' training loss, a weighted sum of

- CE, against the corpus token;
- soft CE, against the target's distribution (EAGLE-3);
- L1, the *full* distance ``sum_v |q_v - p_v|``, not half of it;
- BCE of the confidences (DSpark);
- CE of the corpus token among a selector's candidates (DFlash 2). Its own objective is not public;
  this is the one of third parties: the candidates are those of the unary distribution, which the
  other terms train alone, and a missing label takes the last one's place.

Every term is a weighted mean over the labelled positions, ``sum(term * w) / (sum(w) + 1e-6)``, with
``w_k = exp(-(k - 1) / loss_decay)`` for draft position k (DeepSpec's loss; DSpark paper, eq. 9-12).

With a draft vocabulary D smaller than the target's, q is 0 outside D while p keeps its mass there:
that mass enters L1 as it is and the confidence label ``c* = sum_v min(p_v, q_v) = 1 - L1/2`` counts
it as unreachable. A label outside D has no cross-entropy and leaves that term, weight and all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from dspark.modeling.drafters.heads import CandidateSelector, SequentialHead
from dspark.modeling.head import LocalHead
from dspark.modeling.linear import Fp16WeightLinear, Precision

CHUNK_ROWS, CHUNK_ROWS_ON_GPU = 224, 4096
"""Rows of draft logits alive at once. More make the products faster, up to what memory bears."""

_EPS = 1e-6
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class LossWeights:
    ce: float = 0.1
    soft_ce: float = 0.0
    l1: float = 0.9
    confidence: float = 1.0
    selector: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What the drafter says at N labelled positions, before any distribution is formed."""

    hidden: Tensor  # [N, d] h_k, after the final norm
    vectors: Tensor  # [N, r] of the sequential head
    confidence_logits: Tensor | None  # [N]


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What the target says there; the rows carry no gradient."""

    hidden: Tensor  # [N, d] final hidden state at the token before the label
    log_normalizer: Tensor  # [N] logsumexp of its logits over the *full* vocabulary
    label: Tensor  # [N] int64 corpus token as an index into the draft vocabulary, -1 outside it


@dataclass(frozen=True, slots=True)
class BlockLoss:
    total: Tensor  # [] differentiable
    ce: Tensor  # [] weighted means, detached
    l1: Tensor  # []
    confidence: Tensor  # []
    acceptance: Tensor  # [N] sum_v min(p_v, q_v), detached; before a selector


@dataclass(frozen=True, slots=True)
class WeightSums:
    """What the terms of a batch are divided by."""

    all: Tensor  # []
    known: Tensor  # [] of the rows whose label can be drafted

    @classmethod
    def of(cls, row_weights: Tensor, label: Tensor) -> Self:
        """Both [N]."""
        return cls(row_weights.sum(), (row_weights * (label >= 0)).sum())


class FrozenHead:
    """The target head's rows of the draft vocabulary.

    Its two products towards logits are a third of a training step. Where fp16 weights are what this
    machine multiplies fastest, they run on those; gradients go back through the fp32 weight.
    """

    def __init__(self, weight: Tensor, precision: Precision = "fp32") -> None:
        """weight: [D, d]."""
        self.weight = weight.detach().float().contiguous()
        self.logits: Callable[[Tensor], Tensor] = (
            Fp16WeightLinear(self.weight)
            if precision == "fp16w"
            else partial(torch.nn.functional.linear, weight=self.weight)
        )


def position_weights(block_size: int, loss_decay: float) -> Tensor:
    """[block_size] ``exp(-(k - 1) / loss_decay)`` for k = 1..block_size."""
    return torch.exp(-torch.arange(block_size) / loss_decay)


def chunks(rows: Tensor) -> Iterator[slice]:
    """Parts of the rows [N, ...] whose draft logits are formed together."""
    size = CHUNK_ROWS if rows.device.type == "cpu" else CHUNK_ROWS_ON_GPU
    return (slice(start, start + size) for start in range(0, len(rows), size))


def log_normalizer(head: LocalHead, hidden: Tensor) -> Tensor:
    """[N] logsumexp of the target's logits over its full vocabulary. hidden: [N, d]."""
    return torch.cat([head.logits(hidden[part]).logsumexp(-1) for part in chunks(hidden)])


def block_loss(
    draft: DraftRows,
    target: TargetRows,
    head: FrozenHead,
    sequential: SequentialHead,
    row_weights: Tensor,
    weights: LossWeights,
    sums: "WeightSums | None" = None,
) -> BlockLoss:
    """Loss over N labelled rows. row_weights: [N], w_k of each row; ``sums``: of the whole batch,
    if these rows are only a part of it."""
    sums = sums or WeightSums.of(row_weights, target.label)
    known = row_weights * (target.label >= 0) / (sums.known + _EPS)
    normalized = row_weights / (sums.all + _EPS)
    selector = sequential if isinstance(sequential, CandidateSelector) else None
    vectors, out_weight = draft.vectors, sequential.out_weight
    if out_weight is None:  # nothing is added to all of the logits
        vectors = draft.hidden.new_zeros(len(draft.hidden), 0)
        out_weight = head.weight.new_zeros(len(head.weight), 0)
    distilled, ce, l1, candidates = cast(
        tuple[Tensor, Tensor, Tensor, Tensor],
        _Distillation.apply(  # type: ignore[no-untyped-call]
            draft.hidden,
            vectors,
            out_weight,
            head,
            target,
            _RowWeights(
                weights.ce * known,
                weights.soft_ce * normalized if weights.soft_ce else None,
                weights.l1 * normalized,
            ),
            0 if selector is None else selector.top_k,
        ),
    )
    acceptance = (1 - l1 / 2).clamp(0, 1)
    total, confidence = distilled, distilled.new_zeros(())
    if draft.confidence_logits is not None:
        bce = binary_cross_entropy_with_logits(
            draft.confidence_logits, acceptance, reduction="none"
        )
        confidence = (bce * normalized).sum()
        total = total + weights.confidence * confidence
    if selector is not None:
        chosen = _selection_loss(draft, target.label, head, selector, candidates)
        total = total + weights.selector * (chosen * known).sum()
    return BlockLoss(
        total=total,
        ce=(ce * known).sum(),
        l1=(l1 * normalized).sum(),
        confidence=confidence.detach(),
        acceptance=acceptance,
    )


def _selection_loss(
    draft: DraftRows, label: Tensor, head: FrozenHead, selector: CandidateSelector, columns: Tensor
) -> Tensor:
    """[N] cross-entropy of the label among the candidates in ``columns`` [N, top_k]; of the rows
    without a known label it means nothing."""
    found = columns == label[:, None]
    columns = columns.clone()
    columns[:, -1] = columns[:, -1].where(found.any(1), label.clamp(min=0))
    place = torch.where(found.any(1), found.int().argmax(1), columns.shape[1] - 1)
    unary = torch.bmm(head.weight[columns], draft.hidden[:, :, None])[:, :, 0]
    scores = unary + selector.pairs(draft.vectors, columns)
    return cross_entropy(scores, place, reduction="none")


@dataclass(frozen=True, slots=True)
class _RowWeights:
    """Of each term and row, normalised, [N] each."""

    ce: Tensor
    soft_ce: Tensor | None  # None: that term is left out
    l1: Tensor


class _Distillation(torch.autograd.Function):
    """Weighted CE, soft CE and L1 through head and softmax, with the gradient formed in the forward
    pass.

    Autograd would keep several [N, D] arrays; here only chunks of them exist. With q = softmax(z)
    and s = sign(q - p), the gradient on the logits z of one row is
    ``ce_w * (q - onehot(label)) + soft_w * (sum(p) q - p) + l1_w * q * (s - sum(q * s))``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        vectors: Tensor,
        out_weight: Tensor,
        head: FrozenHead,
        target: TargetRows,
        weights: _RowWeights,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = hidden.shape[0]
        ce, soft, l1 = (hidden.new_zeros(rows) for _ in range(3))
        candidates = target.label.new_empty(rows, top_k)
        grad_hidden, grad_vectors = torch.empty_like(hidden), torch.empty_like(vectors)
        grad_out = torch.zeros_like(out_weight)
        for part in chunks(hidden):
            logits = head.logits(hidden[part]).addmm_(vectors[part], out_weight.T)
            if top_k:
                candidates[part] = logits.topk(top_k, -1).indices
            label = target.label[part, None]
            known = label >= 0
            label = label.clamp(min=0)
            q = torch.softmax(logits, -1, out=logits)
            ce[part] = (-q.gather(1, label).clamp(min=_TINY).log() * known)[:, 0]

            p = head.logits(target.hidden[part])
            p.sub_(target.log_normalizer[part, None]).exp_()
            inside = p.sum(-1)
            if weights.soft_ce is not None:
                soft[part] = -torch.linalg.vecdot(p, q.clamp(min=_TINY).log_())
                soft_grad = (q * inside[:, None]).sub_(p).mul_(weights.soft_ce[part, None])
            gap = torch.sub(q, p, out=p)
            l1[part] = torch.linalg.vector_norm(gap, ord=1, dim=-1) + (1 - inside).clamp_(min=0)

            sign = gap.sign_()
            mean_sign = torch.linalg.vecdot(q, sign)[:, None]
            ce_weight = weights.ce[part, None]
            grad = sign.sub_(mean_sign).mul_(weights.l1[part, None]).add_(ce_weight).mul_(q)
            grad.scatter_add_(1, label, -ce_weight * known)
            if weights.soft_ce is not None:
                grad.add_(soft_grad)
            torch.mm(grad, head.weight, out=grad_hidden[part])
            torch.mm(grad, out_weight, out=grad_vectors[part])
            grad_out.addmm_(grad.T, vectors[part])
        ctx.save_for_backward(grad_hidden, grad_vectors, grad_out)
        ctx.mark_non_differentiable(ce, l1, candidates)
        total = ce * weights.ce + l1 * weights.l1
        if weights.soft_ce is not None:
            total = total + soft * weights.soft_ce
        return total.sum(), ce, l1, candidates

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        grad_hidden, grad_vectors, grad_out = ctx.saved_tensors
        return grad_hidden * scale, grad_vectors * scale, grad_out * scale, None, None, None, None
