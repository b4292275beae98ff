"""The sequential heads: what the previous token adds to a position's draft logits.

W1 covers the whole vocabulary (any token may precede), W2 the draft vocabulary.
"""

from typing import cast

import torch
from torch import Tensor, nn

from dspark.modeling.drafters.config import DrafterConfig


class VanillaMarkovHead(nn.Module):
    """bias(x_{k-1}) = W2 W1[x_{k-1}]: a low-rank bigram table (DSpark paper, section 3.1)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.num_draft_logits, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """previous: [...] target ids. Returns [..., rank]."""
        return cast(Tensor, self.markov_w1(previous))

    def vectors(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """What W2 is applied to. hidden: [..., d] h_k; previous: [...] target ids. Returns
        [..., rank]."""
        return self.embed(previous)

    def bias(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """As `vectors`. Returns [..., draft vocabulary], to add to the logits."""
        return cast(Tensor, self.markov_w2(self.vectors(hidden, previous)))


class GatedMarkovHead(VanillaMarkovHead):
    """bias = W2 (sigmoid(G [h_k; e]) * e) with e = W1[x_{k-1}]: the position's own state decides
    how much of the bigram counts. G has a bias, which the paper's equation leaves out."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def vectors(self, hidden: Tensor, previous: Tensor) -> Tensor:
        embedding = self.embed(previous)
        gate = self.gate_proj(torch.cat((hidden.to(embedding.dtype), embedding), dim=-1))
        return cast(Tensor, gate.sigmoid() * embedding)


def markov_head(config: DrafterConfig) -> VanillaMarkovHead:
    """The head that the config names."""
    return {"vanilla": VanillaMarkovHead, "gated": GatedMarkovHead}[config.markov_head_type](config)
