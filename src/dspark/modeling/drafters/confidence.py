"""The confidence head: how likely a drafted token is accepted, given that those before it were."""

from typing import cast

import torch
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """l_k = w [h_k; W1[x_{k-1}]] + b, with c_k = sigmoid(l_k) (DSpark paper, equation 7).

    The published checkpoints carry the bias that the equation leaves out.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.proj = nn.Linear(num_features, 1)

    def forward(self, hidden: Tensor, previous_embedding: Tensor | None) -> Tensor:
        """hidden: [..., d]; previous_embedding: [..., rank] or None. Returns logits [...]."""
        if previous_embedding is not None:
            hidden = torch.cat((hidden, previous_embedding), dim=-1)
        return cast(Tensor, self.proj(hidden)).squeeze(-1)
