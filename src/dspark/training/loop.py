"""One training step: the loss of a batch of blocks, and the update that follows."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.modeling.drafters.heads import certainty
from dspark.modeling.drafters.interface import Drafter, teacher_forced
from dspark.modeling.linear import resolve_precision
from dspark.modeling.losses import (
    BlockLoss,
    DraftRows,
    FrozenHead,
    LossWeights,
    TargetRows,
    WeightSums,
    block_loss,
    chunks,
    position_weights,
)
from dspark.training.dataset import Blocks
from dspark.training.parallel import ALONE, Ranks
from dspark.training.starts import column_of


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float
    ce: float
    l1: float
    confidence: float
    accepted_length: float  # 1 + mean over blocks of sum_k prod_{i<=k} (1 - L1_i / 2)
    positions: int
    gradient_norm: float


class TeacherForcing:
    """The drafter's answers along a corpus, and their loss against the target's; on the device
    where the model is, and where blocks that are asked about have to be."""

    def __init__(self, model: Drafter, weights: LossWeights, loss_decay: float) -> None:
        self.model = model
        self.device = model.target_head.device
        self._head = FrozenHead(model.target_head, resolve_precision("auto", self.device))
        self._columns = torch.from_numpy(column_of(model)).to(self.device)
        self._weights = weights
        self._row_weights = position_weights(model.config.block_size, loss_decay).to(self.device)

    def draft(self, batch: list[Blocks]) -> DraftRows:
        """Sequence by sequence up to the heads: contexts differ, and masked ones cost the same."""
        hidden, vectors = (
            torch.cat(parts) for parts in zip(*map(self._forward, batch), strict=True)
        )
        previous = torch.cat([blocks.previous.flatten()[blocks.places] for blocks in batch])
        return DraftRows(hidden, vectors, self.model.confidence(hidden, previous))

    def target(self, batch: list[Blocks]) -> TargetRows:
        return TargetRows(
            hidden=torch.cat([blocks.target_hidden for blocks in batch]),
            log_normalizer=torch.cat([blocks.log_normalizer for blocks in batch]),
            label=self._labels(batch),
        )

    def loss(self, draft: DraftRows, part: list[Blocks], batch: list[Blocks]) -> BlockLoss:
        """Of a part of a batch, as its share in the loss of the whole, which may be elsewhere."""
        target = self.target(part)
        return block_loss(
            draft,
            target,
            self._head,
            self.model.sequential_head,
            self._weights_of(part),
            self._weights,
            WeightSums.of(self._weights_of(batch), self._labels(batch)),
        )

    def _weights_of(self, batch: list[Blocks]) -> Tensor:
        """[N] of the labels of a batch."""
        size = batch[0].previous.shape[1]
        places = torch.cat([blocks.places for blocks in batch]).to(self.device)
        return self._row_weights[places % size]

    def _labels(self, batch: list[Blocks]) -> Tensor:
        """[N] of a batch, as columns of the draft logits."""
        return self._columns[torch.cat([blocks.label for blocks in batch]).to(self.device)]

    @torch.inference_mode()
    def judge(self, batch: list[Blocks]) -> "Judgement":
        """What rejection sampling at temperature 1 makes of the drafter's distributions."""
        draft, target = self.draft(batch), self.target(batch)
        acceptance, largest = [], []
        for part in chunks(draft.hidden):
            base = self.model.base_logits(draft.hidden[part])
            q = self.model.sequential_head.combine(base, draft.vectors[part]).softmax(-1)
            p = self._head.logits(target.hidden[part])
            p = p.sub_(target.log_normalizer[part, None]).exp_()
            acceptance.append(torch.minimum(p, q).sum(-1))
            largest.append(q.amax(-1))
        confidence = draft.confidence_logits
        if confidence is None:
            confidence = certainty(torch.cat(largest))
        return Judgement(torch.cat(acceptance).clamp(0, 1), confidence)

    def _forward(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Hidden states [N, d] of the counted labels, and what the sequential head makes of the
        tokens before them [N, r]."""
        features = self.model.fuse(blocks.taps)
        size = blocks.previous.shape[1]
        opened = self.model.open_blocks(features, blocks.tokens, blocks.anchor_positions, size)
        hidden = teacher_forced(opened, blocks.previous)
        vectors = self.model.sequential_head.vectors(hidden, blocks.previous)
        return hidden.flatten(0, 1)[blocks.places], vectors.flatten(0, 1)[blocks.places]


@dataclass(frozen=True, slots=True)
class Judgement:
    acceptance: Tensor  # [N] sum_v min(p_v, q_v)
    confidence_logits: Tensor  # [N] the drafter's own, or its certainty


class Trainer:
    """Teacher forcing and AdamW; one call of ``step`` is one update of the weights.

    Several processes each take a part of every batch; their weights stay equal, because all of them
    make the same update from the sum of the gradients.
    """

    def __init__(self, forcing: TeacherForcing, clip: float, ranks: Ranks = ALONE) -> None:
        self._forcing = forcing
        self._parameters = list(forcing.model.parameters())
        self._clip = clip
        self._ranks = ranks
        self.optimizer = torch.optim.AdamW(self._parameters, weight_decay=0.0, fused=True)

    def step(self, batch: list[Blocks], rate: float) -> StepResult:
        """``batch``: the whole one, the same in every process."""
        figures = self.gradients(batch)
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        loss, ce, l1, confidence, accepted, blocks = figures.tolist()
        return StepResult(
            loss=loss,
            ce=ce,
            l1=l1,
            confidence=confidence,
            accepted_length=1 + accepted / blocks if blocks else float("nan"),
            positions=sum(len(blocks.label) for blocks in batch),
            gradient_norm=float(norm),
        )

    def gradients(self, batch: list[Blocks]) -> Tensor:
        """Leave the gradients of a whole batch in the parameters. Returns [6]: the loss, its terms
        CE, L1 and BCE, and `expected_acceptance`."""
        self.optimizer.zero_grad(set_to_none=True)
        figures = torch.zeros(6)
        part = [blocks.to(self._forcing.device) for blocks in self._ranks.part(batch)]
        if part:
            loss = self._forcing.loss(self._forcing.draft(part), part, batch)
            loss.total.backward()  # type: ignore[no-untyped-call]
            counted = torch.cat([blocks.counted for blocks in part])
            accepted, blocks = expected_acceptance(loss.acceptance, counted)
            parts = (loss.total.detach(), loss.ce, loss.l1, loss.confidence)
            figures = torch.tensor([*map(float, parts), accepted, blocks])
        self._ranks.add_gradients(self._parameters)
        return self._ranks.total(figures)


def expected_acceptance(acceptance: Tensor, counted: Tensor) -> tuple[float, float]:
    """Estimate of the accepted drafts from teacher-forced acceptance [N], summed over the blocks
    whose labels all count, and the number of those blocks.

    counted: bool [A, block_size] with N true entries.
    """
    by_block = acceptance.new_zeros(counted.shape)
    by_block[counted] = acceptance
    whole = by_block[counted.all(dim=1)]
    return float(whole.cumprod(dim=1).sum()), float(len(whole))
