import math

import pytest
import torch
from torch import Tensor

from dspark.modeling import losses
from dspark.modeling.head import LocalHead
from dspark.modeling.linear import resolve_precision
from dspark.modeling.losses import DraftRows, FrozenHead, LossWeights, TargetRows, block_loss

V, D, RANK, HIDDEN, ROWS = 40, 24, 5, 8, 150  # full vocabulary, draft vocabulary, ...


class World:
    """Random rows of a drafter whose vocabulary is the first D of the target's V ids."""

    def __init__(self, draft_size: int = D) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.target_head = normal(V, HIDDEN)
        self.head = FrozenHead(self.target_head[:draft_size])
        self.hidden = normal(ROWS, HIDDEN).requires_grad_()
        self.markov = normal(ROWS, RANK).requires_grad_()
        self.markov_out = normal(draft_size, RANK).requires_grad_()
        self.confidence = normal(ROWS).requires_grad_()
        self.target_hidden = normal(ROWS, HIDDEN)
        self.weights = torch.rand(ROWS, generator=generator)
        label = torch.randint(V, (ROWS,), generator=generator)
        self.label = torch.where(label < draft_size, label, -1)
        self.leaves = (self.hidden, self.markov, self.markov_out, self.confidence)

    def loss(self, weights: LossWeights) -> losses.BlockLoss:
        normalizer = (self.target_hidden @ self.target_head.T).logsumexp(-1)
        return block_loss(
            DraftRows(self.hidden, self.markov, self.confidence),
            TargetRows(self.target_hidden, normalizer, self.label),
            self.head,
            self.markov_out,
            self.weights,
            weights,
        )

    def plain(self, weights: LossWeights) -> tuple[Tensor, Tensor]:
        """The same loss written over the full vocabulary, left to autograd; and sum(min(p, q))."""
        logits = self.hidden @ self.head.weight.T + self.markov @ self.markov_out.T
        outside = torch.full((ROWS, V - len(self.head.weight)), -math.inf)
        log_q = torch.log_softmax(torch.cat([logits, outside], dim=1), dim=-1)
        p = torch.softmax(self.target_hidden @ self.target_head.T, dim=-1)
        known = self.label >= 0
        ce = -log_q[known, self.label[known]]
        l1 = (log_q.exp() - p).abs().sum(-1)
        label = torch.minimum(log_q.exp(), p).sum(-1).detach()
        bce = -(
            label * torch.nn.functional.logsigmoid(self.confidence)
            + (1 - label) * torch.nn.functional.logsigmoid(-self.confidence)
        )

        def mean(term: Tensor, w: Tensor) -> Tensor:
            return (term * w).sum() / (w.sum() + 1e-6)

        total = (
            weights.ce * mean(ce, self.weights[known])
            + weights.l1 * mean(l1, self.weights)
            + weights.confidence * mean(bce, self.weights)
        )
        return total, label


@pytest.mark.parametrize("draft_size", [D, V])
@pytest.mark.parametrize(
    "weights", [LossWeights(), LossWeights(1.0, 0.0, 0.0), LossWeights(0.0, 1.0, 0.0)]
)
def test_value_and_gradients_are_those_of_the_plain_formula(
    draft_size: int, weights: LossWeights
) -> None:
    world = World(draft_size)
    loss = world.loss(weights)
    plain, label = world.plain(weights)
    torch.testing.assert_close(loss.total, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.acceptance, label, rtol=1e-4, atol=1e-5)
    used = [leaf for leaf in world.leaves if leaf is not world.confidence or weights.confidence]
    for actual, expected in zip(
        torch.autograd.grad(loss.total, used), torch.autograd.grad(plain, used), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_l1_is_not_halved_and_mass_outside_the_draft_vocabulary_is_unreachable() -> None:
    world = World()
    world.target_head[D:] *= 100  # nearly all of p lies where q cannot go
    world.target_hidden = world.target_hidden.abs() * 3
    world.target_head[D:] = world.target_head[D:].abs()
    loss = world.loss(LossWeights())
    assert float(loss.l1) == pytest.approx(2.0, abs=1e-3)
    assert float(loss.acceptance.max()) < 1e-3


def test_chunks_do_not_change_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = World()
    monkeypatch.setattr(losses, "CHUNK_ROWS", ROWS)
    expected = whole.loss(LossWeights()).total
    monkeypatch.setattr(losses, "CHUNK_ROWS", 7)
    torch.testing.assert_close(whole.loss(LossWeights()).total, expected)


def test_confidence_gradient_reaches_the_logits_and_not_the_label() -> None:
    world = World()
    only_confidence = world.loss(LossWeights(0.0, 0.0, 1.0)).total
    hidden, confidence = torch.autograd.grad(only_confidence, (world.hidden, world.confidence))
    assert not hidden.any()
    assert confidence.all()


def test_position_weights_decay_by_the_loss_decay_whatever_the_block() -> None:
    weights = losses.position_weights(7, loss_decay=4.0)
    torch.testing.assert_close(weights, torch.tensor([math.exp(-k / 4) for k in range(7)]))
    torch.testing.assert_close(losses.position_weights(3, loss_decay=4.0), weights[:3])


def test_log_normalizer_covers_the_full_vocabulary() -> None:
    world = World()
    head = LocalHead(world.target_head, "fp32")
    torch.testing.assert_close(
        losses.log_normalizer(head, world.target_hidden),
        (world.target_hidden @ world.target_head.T).logsumexp(-1),
    )


@pytest.mark.skipif(
    resolve_precision("auto") != "fp16w", reason="this machine does not keep weights in fp16"
)
def test_a_head_in_fp16_gives_nearly_the_same_loss_and_gradients() -> None:
    """Its weights are rounded to 11 bits, so logits near 10 move by about 5e-3."""
    plain, rounded = World(draft_size=5), World(draft_size=5)
    rounded.head = FrozenHead(rounded.target_head[:5], "fp16w")
    expected, got = (world.loss(LossWeights()) for world in (plain, rounded))
    torch.testing.assert_close(got.total, expected.total, rtol=1e-2, atol=1e-2)
    assert not torch.equal(got.total, expected.total)
    for loss in (expected, got):
        loss.total.backward()
    for left, right in zip(rounded.leaves, plain.leaves, strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=0.1, atol=1e-2)
