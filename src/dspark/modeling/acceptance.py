"""Which drafted tokens the target keeps, and the token it adds itself. Batched over sequences.

`greedy` keeps a token while it is the target's argmax. `rejection` is the rule of Leviathan et al.,
"Fast inference from transformers via speculative decoding" (2023): keep x with probability
min(1, p(x)/q(x)), at the first rejection draw from the normalised (p - q)+, after a whole kept
block from p. Logits, p and q are fp32; comparisons and cumulative sums fp64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.core import acceptance
from dspark.core.errors import InvalidRequestError
from dspark.core.rng import Purpose, uniform
from dspark.core.types import Draft, DraftSource, Floats, SamplingParams, VerificationMode
from dspark.modeling.drafters.shared import SharedDraftParts
from dspark.modeling.sampling import draw, probabilities


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sequence that commits in this step: its anchor, its draft, and where its logits are."""

    first_row: int  # logits of the anchor; those of the draft tokens follow
    anchor: int
    sampling: SamplingParams
    draft: Draft | None = None

    @property
    def drafted(self) -> NDArray[np.int64]:
        return np.zeros(0, np.int64) if self.draft is None else self.draft.tokens

    @property
    def drawn(self) -> bool:
        """Whether its draft was drawn from a distribution that has to be rebuilt."""
        return self.draft is not None and self.draft.source is DraftSource.MODEL

    @property
    def q(self) -> Floats:
        """In `rejection` mode: one probability a drafted token, as the drafter sent it."""
        if self.draft is None or not self.drawn:
            return np.ones(len(self.drafted), np.float32)
        return _sent(self.draft.q)

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + len(self.drafted) + 1)


@dataclass(frozen=True, slots=True)
class Decision:
    """`accepted` draft tokens, then `next_token`. `q_gap` = |q sent - q rebuilt| where rejected."""

    accepted: int
    next_token: int
    q_gap: float = 0.0


class TargetRows(Protocol):
    """What the target says at a step's rows; only as much of it is computed as is asked for."""

    def argmax(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Likeliest token of each of these rows, [len(rows)]."""
        ...

    def logits(self, rows: Sequence[int]) -> Tensor:
        """[len(rows), V] fp32."""
        ...


def decide(
    target: TargetRows,
    candidates: Sequence[Candidate],
    step: int,
    shared: SharedDraftParts | None,
) -> list[Decision]:
    """One decision a candidate, in order. target: the rows that the candidates name.

    `shared` rebuilds q; it may be None where no candidate in `rejection` mode has a draft that was
    drawn.
    """
    decisions: dict[int, Decision] = {}
    greedy: list[int] = []
    sampled: list[int] = []
    for index, candidate in enumerate(candidates):
        is_greedy = candidate.sampling.mode is VerificationMode.GREEDY
        (greedy if is_greedy else sampled).append(index)
    if greedy:
        best = iter(target.argmax([row for i in greedy for row in candidates[i].rows]).tolist())
        for index in greedy:
            candidate = candidates[index]
            own = list(islice(best, len(candidate.rows)))
            kept, token = acceptance.greedy(candidate.drafted.tolist(), own)
            decisions[index] = Decision(kept, token)
    if sampled:
        chosen = _rejection(target, [candidates[i] for i in sampled], step, shared)
        decisions.update(zip(sampled, chosen, strict=True))
    return [decisions[index] for index in range(len(candidates))]


def _rejection(
    target: TargetRows,
    candidates: list[Candidate],
    step: int,
    shared: SharedDraftParts | None,
) -> list[Decision]:
    lengths = np.array([len(c.drafted) for c in candidates])
    if shared is None and any(c.drawn for c in candidates):
        raise InvalidRequestError("a draft cannot be verified by sampling without its drafter")
    logits = target.logits([row for c in candidates for row in c.rows])
    p, _ = probabilities(logits, [c.sampling for c in candidates for _ in c.rows])
    anchors = np.cumsum(lengths + 1) - lengths - 1  # row of p for each candidate's anchor
    accepted = _leading_accepts(p, candidates, lengths, anchors, step)

    weights = p.index_select(0, torch.from_numpy(anchors + accepted).to(p.device))
    rejected = np.flatnonzero(accepted < lengths)
    gaps = np.zeros(len(candidates))
    if len(rejected):
        stops = [(candidates[i], int(accepted[i])) for i in rejected]
        weights[rejected], gaps[rejected] = _residuals(weights[rejected], stops, shared)
    nonces = _nonces(candidates)
    uniforms = np.where(
        accepted < lengths,
        uniform(nonces, step, Purpose.RESIDUAL, accepted),
        uniform(nonces, step, Purpose.BONUS, accepted),
    )
    tokens = draw(weights, uniforms)
    return [
        Decision(int(kept), int(token), float(gap))
        for kept, token, gap in zip(accepted, tokens, gaps, strict=True)
    ]


def _leading_accepts(
    p: Tensor,
    candidates: list[Candidate],
    lengths: NDArray[np.int64],
    anchors: NDArray[np.int64],
    step: int,
) -> NDArray[np.int64]:
    """How many tokens each candidate keeps, [R]: those before its first with u >= p/q."""
    position = np.arange(lengths.max())
    drafted = position < lengths[:, None]  # [R, longest]
    tokens = np.concatenate([c.drafted for c in candidates])
    q = np.concatenate([c.q for c in candidates]).astype(np.float64)
    rows = (anchors[:, None] + position)[drafted]
    p_of_draft = p[torch.from_numpy(rows), torch.from_numpy(tokens)].double().cpu().numpy()
    u = uniform(_nonces(candidates)[:, None], step, Purpose.ACCEPT, position)[drafted]
    kept = np.zeros(drafted.shape, dtype=bool)
    kept[drafted] = u * q < p_of_draft
    accepted: NDArray[np.int64] = np.cumprod(kept, axis=1).sum(axis=1)
    return accepted


def _nonces(candidates: list[Candidate]) -> NDArray[np.uint64]:
    return np.array([c.sampling.nonce for c in candidates], dtype=np.uint64)


def _residuals(
    p: Tensor, stops: list[tuple[Candidate, int]], shared: SharedDraftParts | None
) -> tuple[Tensor, NDArray[np.float64]]:
    """(p - q)+ [M, V] at each rejected token, unnormalised, with q rebuilt; and the gaps in q."""
    tokens = torch.tensor([int(candidate.drafted[k]) for candidate, k in stops])
    drawn = [i for i, (candidate, _) in enumerate(stops) if candidate.drawn]
    looked_up = [i for i, (candidate, _) in enumerate(stops) if not candidate.drawn]
    q = torch.zeros_like(p)
    q[looked_up, tokens[looked_up]] = 1.0
    if drawn:
        assert shared is not None, "what a model drew is verified with its shared parts"
        q[drawn] = _rebuilt([stops[i] for i in drawn], shared, p.device)
    sent = np.array([candidate.q[k] for candidate, k in stops], np.float64)
    gaps = np.abs(sent - q[torch.arange(len(stops)), tokens].double().cpu().numpy())
    residual = (p - q).clamp_(min=0)
    empty = residual.sum(-1) <= acceptance.MIN_RESIDUAL_MASS
    return torch.where(empty[:, None], p, residual), gaps


def _rebuilt(
    stops: list[tuple[Candidate, int]], shared: SharedDraftParts, device: torch.device
) -> Tensor:
    """The distributions [M, V] from which a model drew these tokens."""
    hidden, previous, cuts = [], [], []
    for candidate, k in stops:
        assert candidate.draft is not None
        hidden.append(shared.unpack(candidate.draft.hidden)[: k + 1].to(device))
        before = [candidate.anchor, *candidate.drafted[:k].tolist()]
        previous.append(torch.tensor(before, device=device))
        cuts.append(float(_sent(candidate.draft.cut)[k]))
    return shared.q_row(
        hidden,
        previous,
        torch.tensor([c.sampling.temperature for c, _ in stops], device=device),
        torch.tensor(cuts, device=device),
    )


def _sent(values: Floats | None) -> Floats:
    assert values is not None, "a draft in rejection mode carries q and cuts"
    return values
