"""EAGLE-3: a chain whose layer reads embedding and feature side by side, trained on its own outputs
(the training-time test of the EAGLE-3 paper; shapes and names of DeepSpec's checkpoints)."""

import torch
from torch import Tensor, nn

from dspark.modeling.drafters.chain import ChainDrafter, ChainLayer
from dspark.modeling.drafters.config import DrafterConfig


class Eagle3Layer(ChainLayer):
    """Queries, keys and values come from both rows, each normed, [embedding; feature]; the residual
    stream is the feature as it is."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config, in_width=2 * config.hidden_size)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def join(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1), hidden


class Eagle3(ChainDrafter):
    layer_class = Eagle3Layer
