"""What the drafters that draft a whole block in one pass have in common: a few non-causal layers
over injected target features (DFlash; DSpark paper, section 3).

Row i of a block stands at absolute position s + i, where s is the anchor's; row 0 holds the anchor,
the others masks. If the anchor predicts, row i predicts the token at s + i + 1; if not, row 0 gives
nothing and row i predicts the token of its own place. A block row sees the features of all
positions strictly before the anchor and its whole own block, in a layer with a window only those
within reach.
"""

from typing import cast

import torch
from torch import Tensor, nn

from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.interface import Drafter, OpenBlocks
from dspark.modeling.drafters.layers import (
    Attend,
    DraftLayer,
    Rope,
    attend,
    in_window,
)


class BlockDrafter(Drafter):
    layer_class: type[DraftLayer] = DraftLayer

    def add_layers(self, config: DrafterConfig) -> None:
        d = config.hidden_size
        self.hidden_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            self.layer_class(config) for _ in range(config.num_hidden_layers)
        )
        self.inject_proj: nn.Linear | None = None
        if config.inject_previous_feature:
            self.inject_proj = nn.Linear(d, d, bias=False)
            masks = torch.empty(config.block_rows - 1, d).normal_(std=0.02)
            self.mask_vectors = nn.Parameter(masks)

    def fuse(self, taps: Tensor) -> Tensor:
        return cast(Tensor, self.hidden_norm(super().fuse(taps)))

    def open_blocks(
        self, features: Tensor, tokens: Tensor, positions: Tensor, block_size: int
    ) -> OpenBlocks:
        return _ParallelBlocks(self, features, positions, block_size)

    def forward_blocks(
        self,
        features: Tensor,
        anchor_positions: Tensor,
        anchor_tokens: Tensor,
        block_size: int | None = None,
    ) -> Tensor:
        """Hidden states of A independent blocks of one sequence in one pass.

        features: [L, d] fused; anchor_positions, anchor_tokens: [A] int64.
        Returns [A, block_size, d], one row for each draft.
        """
        size = (block_size or self.config.block_size) + self._idle_rows
        num_blocks, device = len(anchor_positions), features.device
        in_context = torch.arange(len(features), device=device) < anchor_positions[:, None]
        same_block = torch.eye(num_blocks, dtype=torch.bool, device=device)
        visible = torch.cat((in_context, same_block.repeat_interleave(size, 1)), 1)
        visible = visible.repeat_interleave(size, 0)
        rows_at = self.block_positions(anchor_positions, size)
        keys_at = torch.cat((torch.arange(len(features), device=device), rows_at))

        before_anchor = features[(anchor_positions - 1).clamp(min=0)]
        before_anchor = before_anchor.where(anchor_positions[:, None] > 0, 0.0)
        rows = self.block_inputs(anchor_tokens, before_anchor, size)
        rope = self.block_rope(anchor_positions, size, features.dtype)
        context_rope = self.rotary(torch.arange(len(features), device=device), features.dtype)
        for layer, window in zip(self.draft_layers, self.config.windows, strict=True):
            seen = visible
            if window:
                seen = seen & in_window(rows_at, keys_at, window, self.config.causal_windows)
            context = layer.self_attn.keys_values(features, context_rope)

            def attend_rows(
                q: Tensor,
                k: Tensor,
                v: Tensor,
                context: tuple[Tensor, Tensor] = context,
                seen: Tensor = seen,
            ) -> Tensor:
                keys, values = (torch.cat(pair, 1) for pair in zip(context, (k, v), strict=True))
                return attend(q, keys, values, seen)

            rows = self._through(layer, rows, rope, attend_rows, size)
        return self.drafting_rows(self.norm(rows).view(num_blocks, size, -1))

    @property
    def draft_layers(self) -> list[DraftLayer]:
        return cast(list[DraftLayer], list(self.layers))

    @property
    def _idle_rows(self) -> int:
        return int(not self.config.anchor_predicts)

    def drafting_rows(self, rows: Tensor) -> Tensor:
        """Those of whole blocks [A, size, d] that predict a token."""
        return rows[:, self._idle_rows :]

    def block_rope(self, anchor_positions: Tensor, size: int, dtype: torch.dtype) -> Rope:
        """Of the rows of blocks whose anchors stand at positions [A]: [A * size, head_dim] each."""
        return cast(Rope, self.rotary(self.block_positions(anchor_positions, size), dtype))

    def block_positions(self, anchor_positions: Tensor, size: int) -> Tensor:
        """Of the same rows: [A * size]."""
        offsets = torch.arange(size, device=anchor_positions.device)
        return (anchor_positions[:, None] + offsets).flatten()

    def block_inputs(self, anchor_tokens: Tensor, before_anchor: Tensor, size: int) -> Tensor:
        """[A], [A, d] -> the first layer's input rows [A * size, d]."""
        anchors = self.embedding[anchor_tokens][:, None]
        if self.inject_proj is None:
            masks = self.embedding[self.config.mask_token_id].expand(size - 1, -1)
        else:
            masks = self.mask_vectors[: size - 1]
        rows = torch.cat((anchors, masks.expand(len(anchors), -1, -1)), 1)
        if self.inject_proj is not None:
            rows = rows + self.inject_proj(before_anchor)[:, None]
        return rows.flatten(0, 1)

    def _through(
        self, layer: DraftLayer, rows: Tensor, rope: Rope, attend_rows: Attend, size: int
    ) -> Tensor:
        """One layer over rows [A * size, d] of blocks of ``size`` rows."""
        return cast(Tensor, layer(rows, rope, attend_rows))


class _ParallelBlocks:
    def __init__(
        self, drafter: BlockDrafter, features: Tensor, positions: Tensor, block_size: int
    ) -> None:
        self._forward = drafter.forward_blocks
        self._features, self._positions, self._size = features, positions, block_size

    def rows(self, previous: Tensor) -> Tensor:
        return self._forward(self._features, self._positions, previous, self._size)
