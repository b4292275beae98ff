"""MTP-1: one extra token from one more layer, as multi-token prediction modules of production
models give it (DeepSeek-V3 technical report, section 2.2). It reads the tapped layers that all
drafters read, where a module trained with its model reads the last one."""

import torch
from torch import Tensor, nn

from dspark.modeling.drafters.chain import ChainDrafter, ChainLayer
from dspark.modeling.drafters.config import DrafterConfig


class MTPLayer(ChainLayer):
    """A projection joins both rows, each normed, [embedding; feature]; then an ordinary layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        self.enorm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * d, d, bias=False)

    def join(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        return self.input_layernorm(rows), rows


class MTP1(ChainDrafter):
    layer_class = MTPLayer
