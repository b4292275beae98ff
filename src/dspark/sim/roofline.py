"""A described machine instead of a measured one: what a step costs on a card, from its data sheet.

    tokens(B) = launch + max(2 P B / F, (P + H) w / M)      seconds, of B rows
    head row  = 2 H / F                                     for each row that needs logits
    context   = kv / M                                      for each context token attended to
    draft(R)  = launch + max(2 D R k / F, D w / M)          of k tokens for each of R requests

P: the target's weights, without head and embedding; H: the head's; D: those a drafted token passes
through; w: bytes a weight; kv: bytes of keys and values a token; F, M: FLOP/s and bytes/s of the
card, times `efficiency`. For dense models on one card. Reading the KV cache is added to the rest
and not overlapped with it; attention's own multiplications, small beside it, are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import ceil, floor, isfinite

from dspark.core.cost import Curve, StepCost
from dspark.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Card:
    """`graph_tiers`: batch sizes with a captured graph; a step is padded up to the next one, and
    past the last it runs unpadded. Empty: no padding."""

    flops: float  # FLOP/s, dense, in the precision that is served
    bandwidth: float  # bytes/s of the device memory
    efficiency: float  # share of both that real kernels reach
    launch_seconds: float  # of one pass through a model, whatever its size
    overhead_seconds: float  # of a step outside both models
    graph_tiers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.efficiency > 1:
            raise ConfigError(f"A card's efficiency is at most 1, not {self.efficiency}.")
        if list(self.graph_tiers) != sorted({tier for tier in self.graph_tiers if tier > 0}):
            raise ConfigError(f"Graph tiers must rise from 1 or more: {self.graph_tiers}.")

    def pass_seconds(self, flops: float, read_bytes: float) -> float:
        """One pass through a model: bound by arithmetic or by reading the weights."""
        slower = max(flops / self.flops, read_bytes / self.bandwidth)
        return self.launch_seconds + slower / self.efficiency

    def padded(self, rows: int) -> int:
        return next((tier for tier in self.graph_tiers if tier >= rows), rows)


@dataclass(frozen=True, slots=True)
class Model:
    """A target and its drafter."""

    parameters: float  # the target's, without head and embedding
    head_parameters: float
    drafter_parameters: float  # those a drafted token passes through, the head included
    weight_bytes: float  # a weight
    kv_bytes: float  # a token of the target's cache

    def __post_init__(self) -> None:
        _check_positive(self)


def step_cost(card: Card, model: Model, draft_length: int) -> StepCost:
    """The cost surface for a planner that drafts `draft_length` tokens a request; 0: none."""
    body, drafter = model.parameters, model.drafter_parameters
    body_bytes = (body + model.head_parameters) * model.weight_bytes
    drafter_bytes = drafter * model.weight_bytes

    def verify(rows: int) -> float:
        return card.pass_seconds(2 * body * card.padded(rows), body_bytes)

    def draft(requests: int) -> float:
        return card.pass_seconds(2 * drafter * requests * draft_length, drafter_bytes)

    row_bytes = 2 * card.bandwidth / card.flops  # what is read while one weight multiplies one row
    verify_ridge = body_bytes / (body * row_bytes)
    draft_ridge = model.weight_bytes / (row_bytes * max(draft_length, 1))
    return StepCost(
        tokens=_curve(verify, verify_ridge, card.graph_tiers),
        draft=_curve(draft, draft_ridge) if draft_length else None,
        head_row_seconds=2 * model.head_parameters / (card.flops * card.efficiency),
        context_token_seconds=model.kv_bytes / (card.bandwidth * card.efficiency),
        overhead_seconds=card.overhead_seconds,
    )


def _curve(seconds: Callable[[int], float], ridge: float, tiers: tuple[int, ...] = ()) -> Curve:
    """`seconds` exactly, at every whole count: it is linear between these sizes."""
    jumps = [size for tier in tiers for size in (tier, tier + 1)]
    knots = {1, *jumps, max(floor(ridge), 1), ceil(ridge)}
    counts = sorted({*knots, 2 * max(knots)})
    return Curve(tuple(counts), tuple(seconds(count) for count in counts))


def _check_positive(described: Card | Model) -> None:
    for field in fields(described):
        value = getattr(described, field.name)
        if isinstance(value, int | float) and not (isfinite(value) and value > 0):
            name = f"{type(described).__name__.lower()}'s {field.name}"
            raise ConfigError(f"A {name} must be positive, not {value}.")
