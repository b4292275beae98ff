"""DFlash 2: DFlash with short convolutions inside the block, and a selector that walks through the
likeliest candidates of each position from left to right (published checkpoints and code of z-lab).
"""

from typing import cast

import torch
from torch import Tensor, nn

from dspark.modeling.drafters.block import BlockDrafter
from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.layers import Attend, DraftLayer, Rope

SIDES, TAPS = 2, 2


class BlockConvolution(nn.Module):
    """A causal two-tap filter over the rows of a block, before and after a sub-layer.

    y_t[c] = sum over taps i of (base[side, i, c] + delta_t[side, i, group of c]) x_{t-i}[c], with
    zeros before the block. delta is a projection of the sub-layer's normed input, unfiltered: a row
    decides by its own content how much of its left neighbour it takes in. Starts as the identity.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.base_kernel = nn.Parameter(torch.empty(SIDES, TAPS, d))
        groups = d // config.conv_group_size
        self.kernel_projection = nn.Linear(d, SIDES * TAPS * groups, bias=False)

    @torch.no_grad()
    def reset(self) -> None:
        """Pass every row through as it is."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def kernels(self, normed: Tensor) -> Tensor:
        """normed: [N, d]. Returns what `filtered` takes, [N, SIDES, TAPS, d]."""
        delta = self.kernel_projection(normed).view(len(normed), SIDES, TAPS, -1)
        width = self.base_kernel.shape[-1]
        return cast(
            Tensor, self.base_kernel + delta.repeat_interleave(width // delta.shape[-1], -1)
        )


def filtered(rows: Tensor, kernels: Tensor, size: int) -> Tensor:
    """rows: [A * size, d]; kernels: [A * size, TAPS, d]. Returns [A * size, d]."""
    blocks = rows.view(-1, size, rows.shape[-1])
    before = nn.functional.pad(blocks[:, :-1], (0, 0, 1, 0)).view_as(rows)
    return torch.addcmul(rows * kernels[:, 0], before, kernels[:, 1])


class DFlash2Layer(DraftLayer):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def forward_blocks(self, rows: Tensor, rope: Rope, attend_rows: Attend, size: int) -> Tensor:
        """rows: [A * size, d]. Returns the same shape."""
        normed = self.input_layernorm(rows)
        before, after = self.attention_conv.kernels(normed).unbind(1)
        mixed = self.attention(filtered(normed, before, size), rope, attend_rows)
        rows = rows + filtered(mixed, after, size)
        normed = self.post_attention_layernorm(rows)
        before, after = self.mlp_conv.kernels(normed).unbind(1)
        return rows + filtered(self.mlp(filtered(normed, before, size)), after, size)


class DFlash2(BlockDrafter):
    layer_class = DFlash2Layer

    def reset_weights(self) -> None:
        super().reset_weights()
        for module in self.modules():
            if isinstance(module, BlockConvolution):
                module.reset()

    def _through(
        self, layer: DraftLayer, rows: Tensor, rope: Rope, attend_rows: Attend, size: int
    ) -> Tensor:
        return cast(DFlash2Layer, layer).forward_blocks(rows, rope, attend_rows, size)
