import math

import pytest
import torch
from torch import Tensor

from dspark.modeling import losses
from dspark.modeling.drafters.heads import CandidateSelector, SequentialHead, VanillaMarkovHead
from dspark.modeling.head import LocalHead
from dspark.modeling.linear import resolve_precision
from dspark.modeling.losses import DraftRows, FrozenHead, LossWeights, TargetRows, block_loss
from tests.support.drafters import random_config

V, D, RANK, HIDDEN, ROWS = 40, 24, 5, 8, 150  # full vocabulary, draft vocabulary, ...
ONLY_CE = LossWeights(ce=1.0, l1=0.0, confidence=0.0)
ONLY_SOFT = LossWeights(ce=0.0, soft_ce=1.0, l1=0.0, confidence=0.0)
ONLY_L1 = LossWeights(ce=0.0, l1=1.0, confidence=0.0)
ONLY_CONFIDENCE = LossWeights(ce=0.0, l1=0.0, confidence=1.0)
EVERYTHING = LossWeights(ce=0.3, soft_ce=0.5, l1=0.7, confidence=1.1)


class World:
    """Random rows of a drafter whose vocabulary is the first D of the target's V ids."""

    def __init__(self, draft_size: int = D) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.target_head = normal(V, HIDDEN)
        self.head = FrozenHead(self.target_head[:draft_size])
        self.hidden = normal(ROWS, HIDDEN).requires_grad_()
        self.vectors = normal(ROWS, RANK).requires_grad_()
        config = random_config(
            vocab_size=V, hidden_size=HIDDEN, markov_rank=RANK, draft_vocab_size=draft_size
        )
        self.sequential: SequentialHead = VanillaMarkovHead(config)
        self.out = self.sequential.markov_w2.weight
        torch.nn.init.normal_(self.out, generator=generator)
        self.confidence = normal(ROWS).requires_grad_()
        self.target_hidden = normal(ROWS, HIDDEN)
        self.weights = torch.rand(ROWS, generator=generator)
        label = torch.randint(V, (ROWS,), generator=generator)
        self.label = torch.where(label < draft_size, label, -1)
        self.leaves = (self.hidden, self.vectors, self.out, self.confidence)

    def loss(self, weights: LossWeights) -> losses.BlockLoss:
        normalizer = (self.target_hidden @ self.target_head.T).logsumexp(-1)
        return block_loss(
            DraftRows(self.hidden, self.vectors, self.confidence),
            TargetRows(self.target_hidden, normalizer, self.label),
            self.head,
            self.sequential,
            self.weights,
            weights,
        )

    def plain(self, weights: LossWeights) -> tuple[Tensor, Tensor]:
        """The same loss written over the full vocabulary, left to autograd; and sum(min(p, q))."""
        logits = self.hidden @ self.head.weight.T + self.vectors @ self.out.T
        outside = torch.full((ROWS, V - len(self.head.weight)), -math.inf)
        log_q = torch.log_softmax(torch.cat([logits, outside], dim=1), dim=-1)
        p = torch.softmax(self.target_hidden @ self.target_head.T, dim=-1)
        known = self.label >= 0
        ce = -log_q[known, self.label[known]]
        soft = -(p * log_q).masked_fill(torch.isinf(log_q), 0.0).sum(-1)
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
            + weights.soft_ce * mean(soft, self.weights)
            + weights.l1 * mean(l1, self.weights)
            + weights.confidence * mean(bce, self.weights)
        )
        return total, label


@pytest.mark.parametrize("draft_size", [D, V])
@pytest.mark.parametrize("weights", [LossWeights(), ONLY_CE, ONLY_SOFT, ONLY_L1, EVERYTHING])
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
    only_confidence = world.loss(ONLY_CONFIDENCE).total
    hidden, confidence = torch.autograd.grad(only_confidence, (world.hidden, world.confidence))
    assert not hidden.any()
    assert confidence.all()


@pytest.mark.parametrize("top_k", [1, 4, D])
def test_a_selector_is_trained_among_its_candidates_with_the_label_forced_in(top_k: int) -> None:
    world = World()
    config = random_config(
        method="dflash2", vocab_size=V, hidden_size=HIDDEN, markov_rank=RANK, conv_group_size=8,
        draft_vocab_size=D, selector_top_k=top_k,
    )  # fmt: skip
    world.sequential = selector = CandidateSelector(config)
    found = world.loss(LossWeights(ce=1.0, l1=0.0, confidence=0.0, selector=0.5)).total

    unary = world.hidden @ world.head.weight.T
    pairs = world.vectors @ selector.successor_codebook.T
    total, selection = torch.zeros(()), torch.zeros(())
    for row in range(ROWS):
        label = int(world.label[row])
        if label < 0:
            continue
        columns = unary[row].topk(top_k).indices.tolist()
        if label not in columns:
            columns[-1] = label
        scores = (unary + pairs)[row, columns]
        weight = world.weights[row]
        selection = selection - weight * scores.log_softmax(-1)[columns.index(label)]
        total = total - weight * unary[row].log_softmax(-1)[label]
    weights = world.weights[world.label >= 0].sum() + 1e-6
    expected = (total + 0.5 * selection) / weights
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    leaves = (world.hidden, world.vectors, selector.successor_codebook)
    for actual, wanted in zip(
        torch.autograd.grad(found, leaves, retain_graph=True, allow_unused=True),
        torch.autograd.grad(expected, leaves, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-6)


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
