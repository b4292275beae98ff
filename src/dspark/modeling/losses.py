"""The drafter's training loss, ``L = ce * CE + l1 * L1 + confidence * BCE``.

Every term is a weighted mean over the labelled positions, ``sum(term * w) / (sum(w) + 1e-6)``, with
``w_k = exp(-(k - 1) / loss_decay)`` for draft position k (DeepSpec's loss; DSpark paper, eq. 9-12).
L1 is the *full* distance ``sum_v |q_v - p_v|``, not half of it.

With a draft vocabulary D smaller than the target's, q is 0 outside D while p keeps its mass there:
that mass enters L1 as it is and the confidence label ``c* = sum_v min(p_v, q_v) = 1 - L1/2`` counts
it as unreachable. A label outside D has no cross-entropy and leaves that term, weight and all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from dspark.modeling.head import LocalHead
from dspark.modeling.linear import Fp16WeightLinear, Precision

CHUNK_ROWS = 224
"""Rows of draft logits alive at once. More make the products faster, up to what memory bears."""

_EPS = 1e-6
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class LossWeights:
    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What the drafter says at N labelled positions, before any distribution is formed."""

    hidden: Tensor  # [N, d] h_k, after the final norm
    markov: Tensor  # [N, r] what the Markov head's W2 is applied to
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
    acceptance: Tensor  # [N] sum_v min(p_v, q_v), detached


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


def log_normalizer(head: LocalHead, hidden: Tensor) -> Tensor:
    """[N] logsumexp of the target's logits over its full vocabulary. hidden: [N, d]."""
    starts = range(0, len(hidden), CHUNK_ROWS)
    return torch.cat([head.logits(hidden[s : s + CHUNK_ROWS]).logsumexp(-1) for s in starts])


def block_loss(
    draft: DraftRows,
    target: TargetRows,
    head: FrozenHead,
    markov_out: Tensor,
    row_weights: Tensor,
    weights: LossWeights,
) -> BlockLoss:
    """Loss over N labelled rows. markov_out: [D, r] (W2). row_weights: [N], w_k of each row."""
    known = row_weights * (target.label >= 0)
    ce_weights = weights.ce * known / (known.sum() + _EPS)
    normalized = row_weights / (row_weights.sum() + _EPS)
    distilled, ce, l1 = cast(
        tuple[Tensor, Tensor, Tensor],
        _Distillation.apply(  # type: ignore[no-untyped-call]
            draft.hidden,
            draft.markov,
            markov_out,
            head,
            target,
            ce_weights,
            weights.l1 * normalized,
        ),
    )
    acceptance = (1 - l1 / 2).clamp(0, 1)
    total, confidence = distilled, torch.zeros(())
    if draft.confidence_logits is not None:
        bce = binary_cross_entropy_with_logits(
            draft.confidence_logits, acceptance, reduction="none"
        )
        confidence = (bce * normalized).sum()
        total = total + weights.confidence * confidence
    return BlockLoss(
        total=total,
        ce=(ce * known).sum() / (known.sum() + _EPS),
        l1=(l1 * normalized).sum(),
        confidence=confidence.detach(),
        acceptance=acceptance,
    )


class _Distillation(torch.autograd.Function):
    """Weighted CE + L1 through head and softmax, with the gradient formed in the forward pass.

    Autograd would keep several [N, D] arrays; here only chunks of them exist. With q = softmax(z)
    and s = sign(q - p), the gradient on the logits z of one row is
    ``ce_w * (q - onehot(label)) + l1_w * q * (s - sum(q * s))``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        markov: Tensor,
        markov_out: Tensor,
        head: FrozenHead,
        target: TargetRows,
        ce_weights: Tensor,
        l1_weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden.shape[0]
        ce, l1 = hidden.new_zeros(rows), hidden.new_zeros(rows)
        grad_hidden, grad_markov = torch.empty_like(hidden), torch.empty_like(markov)
        grad_out = torch.zeros_like(markov_out)
        for start in range(0, rows, CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            logits = head.logits(hidden[part]).addmm_(markov[part], markov_out.T)
            label = target.label[part, None]
            known = label >= 0
            label = label.clamp(min=0)
            q = torch.softmax(logits, -1, out=logits)
            ce[part] = (-q.gather(1, label).clamp(min=_TINY).log() * known)[:, 0]

            p = head.logits(target.hidden[part])
            p.sub_(target.log_normalizer[part, None]).exp_()
            outside = (1 - p.sum(-1)).clamp_(min=0)
            gap = torch.sub(q, p, out=p)
            l1[part] = torch.linalg.vector_norm(gap, ord=1, dim=-1) + outside

            sign = gap.sign_()
            mean_sign = torch.linalg.vecdot(q, sign)[:, None]
            ce_weight = ce_weights[part, None]
            grad = sign.sub_(mean_sign).mul_(l1_weights[part, None]).add_(ce_weight).mul_(q)
            grad.scatter_add_(1, label, -ce_weight * known)
            torch.mm(grad, head.weight, out=grad_hidden[part])
            torch.mm(grad, markov_out, out=grad_markov[part])
            grad_out.addmm_(grad.T, markov[part])
        ctx.save_for_backward(grad_hidden, grad_markov, grad_out)
        ctx.mark_non_differentiable(ce, l1)
        return (ce * ce_weights + l1 * l1_weights).sum(), ce, l1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        grad_hidden, grad_markov, grad_out = ctx.saved_tensors
        return grad_hidden * scale, grad_markov * scale, grad_out * scale, None, None, None, None
