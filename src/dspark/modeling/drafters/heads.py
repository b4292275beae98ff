"""The sequential heads: what the tokens before a position add to its draft logits.

All of them are a product W2 v of the draft vocabulary's rows W2 with a vector v [r] that depends on
the previous token, and, by head, on the position's own hidden row and on the positions before.
W1 covers the whole vocabulary (any token may precede), W2 the draft vocabulary.
"""

from typing import cast

import torch
from torch import Tensor, nn

from dspark.modeling.drafters.config import DrafterConfig


class SequentialHead(nn.Module):
    """The interface, and the head of drafters that have none: r is 0, and nothing is added."""

    rank = 0

    def start(self, rows: int) -> Tensor | None:
        """The state before the first position of so many blocks; None for heads without one."""
        return None

    def step(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """v of a position, and the state after it. hidden: [..., d]; previous: [...] target ids.
        Returns [..., r]; heads without a state take any shape of rows."""
        return hidden.new_zeros(*hidden.shape[:-1], 0), None

    def vectors(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """v of all positions of A blocks. hidden: [A, K, d]; previous: [A, K]. [A, K, r]."""
        return self.step(hidden, previous, None)[0]

    def combine(self, base: Tensor, vectors: Tensor) -> Tensor:
        """The draft logits [N, U]. base: [N, U] without this head; vectors: [N, r]."""
        return base

    def embed(self, previous: Tensor) -> Tensor:
        """[...] target ids -> [..., r], what is known of the previous token alone."""
        return torch.zeros(*previous.shape, 0, device=previous.device)

    @property
    def out_weight(self) -> Tensor | None:
        """W2 [U, r], where it is added to all logits."""
        return None


class VanillaMarkovHead(SequentialHead):
    """v = W1[x_{k-1}]: a low-rank bigram table (DSpark paper, section 3.1)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, config.num_draft_logits, bias=False)

    def step(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.embed(previous), None

    def combine(self, base: Tensor, vectors: Tensor) -> Tensor:
        return cast(Tensor, self.markov_w2(vectors)).add_(base)

    def embed(self, previous: Tensor) -> Tensor:
        return cast(Tensor, self.markov_w1(previous))

    @property
    def out_weight(self) -> Tensor | None:
        return self.markov_w2.weight


class GatedMarkovHead(VanillaMarkovHead):
    """v = sigmoid(G [h_k; e]) * e with e = W1[x_{k-1}]: the position's own state decides how much
    of the bigram counts. G has a bias, which the paper's equation leaves out."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)

    def step(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        embedding = self.embed(previous)
        gate = self.gate_proj(torch.cat((hidden.to(embedding.dtype), embedding), dim=-1))
        return gate.sigmoid() * embedding, None


class RNNHead(VanillaMarkovHead):
    """A small recurrence over the block (DSpark paper, equations 3-6; with the linear biases that
    they leave out). With (g, c, o) = J [s; e; h_k]: v = tanh(o), then
    s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c). So v reads the state of the position before."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * self.rank + config.hidden_size, 3 * self.rank)

    def start(self, rows: int) -> Tensor | None:
        return torch.zeros(rows, self.rank, device=self.markov_w1.weight.device)

    def step(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert state is not None, "a recurrence has a state"
        embedding = self.embed(previous)
        joint = self.joint_proj(torch.cat((state, embedding, hidden.to(embedding.dtype)), dim=-1))
        gate, candidate, out = joint.chunk(3, dim=-1)
        kept = gate.sigmoid()
        return out.tanh(), kept * state + (1 - kept) * candidate.tanh()

    def vectors(self, hidden: Tensor, previous: Tensor) -> Tensor:
        state, found = self.start(len(hidden)), []
        for row, token in zip(hidden.unbind(1), previous.unbind(1), strict=True):
            vector, state = self.step(row, token, state)
            found.append(vector)
        return torch.stack(found, 1)


class CandidateSelector(SequentialHead):
    """DFlash 2's walk over candidates: of the ``selector_top_k`` likeliest tokens of a position,
    u(b) + sum_r A[a, r] (H h_k)_r B[b, r] for token b after a; all others have probability 0.

    Which tokens those are both sides find out from the same hidden row. Their 16th and 17th logit
    would have to be equal to rounding for the two to differ, by a token of least probability.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.top_k = min(config.selector_top_k, config.num_draft_logits)
        self.hidden_projection = nn.Linear(config.hidden_size, self.rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, self.rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.num_draft_logits, self.rank))
        for codebook in (self.predecessor_codebook, self.successor_codebook):
            nn.init.normal_(codebook, std=0.02)

    def step(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        projected = self.hidden_projection(hidden.to(self.predecessor_codebook.dtype))
        return self.embed(previous) * projected, None

    def combine(self, base: Tensor, vectors: Tensor) -> Tensor:
        unary, candidates = base.topk(self.top_k, dim=-1)
        scores = unary + self.pairs(vectors, candidates)
        return torch.full_like(base, -torch.inf).scatter_(1, candidates, scores)

    def pairs(self, vectors: Tensor, candidates: Tensor) -> Tensor:
        """What the vectors [N, r] add to the candidates [N, m], columns of the logits: [N, m]."""
        return torch.bmm(self.successor_codebook[candidates], vectors[:, :, None])[:, :, 0]

    def embed(self, previous: Tensor) -> Tensor:
        return self.predecessor_codebook[previous]


_MARKOV_HEADS = {"vanilla": VanillaMarkovHead, "gated": GatedMarkovHead, "rnn": RNNHead}


def head_name(config: DrafterConfig) -> str:
    """Of the head's tensors in a checkpoint."""
    return "candidate_selector" if config.method == "dflash2" else "markov_head"


def sequential_head(config: DrafterConfig) -> SequentialHead:
    """The head that the config names."""
    if config.method == "dflash2":
        return CandidateSelector(config)
    if config.markov_rank == 0:
        return SequentialHead()
    return _MARKOV_HEADS[config.markov_head_type](config)


def certainty(largest: Tensor) -> Tensor:
    """Logit of the *largest* drafted probability of a position, whichever token is drawn: how sure
    a drafter is before it chooses, for calibration to make a confidence of, if it has learnt none.
    That of the drawn token would let the plan depend on the draw."""
    return torch.logit(largest, eps=1e-6)
