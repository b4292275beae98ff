"""The sequential head: what the previous token adds to a position's draft logits."""

from typing import cast

from torch import Tensor, nn


class VanillaMarkovHead(nn.Module):
    """bias(x_{k-1}) = W2 W1[x_{k-1}]: a low-rank bigram table (DSpark paper, section 3.1).

    W1 covers the whole vocabulary (any token may precede), W2 the draft vocabulary.
    """

    def __init__(self, vocab_size: int, rank: int, num_draft_logits: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_draft_logits, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """previous: [...] target ids. Returns [..., rank]."""
        return cast(Tensor, self.markov_w1(previous))

    def bias(self, previous: Tensor) -> Tensor:
        """previous: [...] target ids. Returns [..., draft vocabulary], to add to the logits."""
        return cast(Tensor, self.markov_w2(self.markov_w1(previous)))
