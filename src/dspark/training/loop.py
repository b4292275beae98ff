"""One training step: the loss of a batch of blocks, and the update that follows."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.modeling.drafters.dspark import DSparkModel
from dspark.modeling.linear import resolve_precision
from dspark.modeling.losses import (
    BlockLoss,
    DraftRows,
    FrozenHead,
    LossWeights,
    TargetRows,
    block_loss,
    position_weights,
)
from dspark.training.dataset import Blocks
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
    """The drafter's answers along a corpus, and their loss against the target's."""

    def __init__(self, model: DSparkModel, weights: LossWeights, loss_decay: float) -> None:
        self.model = model
        self._head = FrozenHead(model.head, resolve_precision("auto"))
        self._columns = torch.from_numpy(column_of(model))
        self._weights = weights
        self._row_weights = position_weights(model.config.block_size, loss_decay)

    def draft(self, batch: list[Blocks]) -> DraftRows:
        """Sequence by sequence up to the heads: contexts differ, and masked ones cost the same."""
        hidden = torch.cat([self._hidden(blocks) for blocks in batch])
        previous = torch.cat([blocks.previous for blocks in batch])
        return DraftRows(
            hidden=hidden,
            markov=self.model.markov_head.vectors(hidden, previous),
            confidence_logits=self.model.confidence(hidden, previous),
        )

    def loss(self, draft: DraftRows, batch: list[Blocks]) -> BlockLoss:
        target = TargetRows(
            hidden=torch.cat([blocks.target_hidden for blocks in batch]),
            log_normalizer=torch.cat([blocks.log_normalizer for blocks in batch]),
            label=self._columns[torch.cat([blocks.label for blocks in batch])],
        )
        counted = torch.cat([blocks.counted for blocks in batch])
        by_position = self._row_weights[: counted.shape[1]].expand(counted.shape)
        markov_out = self.model.markov_head.markov_w2.weight
        return block_loss(
            draft, target, self._head, markov_out, by_position[counted], self._weights
        )

    def _hidden(self, blocks: Blocks) -> Tensor:
        """[N, d] draft hidden states of the counted labels."""
        hidden = self.model.forward_blocks(
            self.model.fuse(blocks.taps),
            blocks.anchor_positions,
            blocks.anchor_tokens,
            block_size=blocks.counted.shape[1],
        )
        return hidden[blocks.counted]


class Trainer:
    """Teacher forcing and AdamW; one call of ``step`` is one update of the weights."""

    def __init__(self, forcing: TeacherForcing, clip: float) -> None:
        self._forcing = forcing
        self._parameters = list(forcing.model.parameters())
        self._clip = clip
        self.optimizer = torch.optim.AdamW(self._parameters, weight_decay=0.0, fused=True)

    def step(self, batch: list[Blocks], rate: float) -> StepResult:
        loss = self._forcing.loss(self._forcing.draft(batch), batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.total.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        counted = torch.cat([blocks.counted for blocks in batch])
        return StepResult(
            loss=float(loss.total.detach()),
            ce=float(loss.ce),
            l1=float(loss.l1),
            confidence=float(loss.confidence),
            accepted_length=expected_accepted_length(loss.acceptance, counted),
            positions=len(loss.acceptance),
            gradient_norm=float(norm),
        )


def expected_accepted_length(acceptance: Tensor, counted: Tensor) -> float:
    """Estimate from teacher-forced acceptance [N] over the blocks whose labels all count.

    counted: bool [A, block_size] with N true entries. nan if every block is cut short.
    """
    by_block = torch.zeros(counted.shape)
    by_block[counted] = acceptance
    whole = by_block[counted.all(dim=1)]
    return 1 + float(whole.cumprod(dim=1).sum(dim=1).mean())
