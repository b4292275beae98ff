"""Figures of a simulated run, from what its cells did."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from dspark.sim.cell import CellResult, Journey


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a set of finished requests, in virtual seconds; None where there is nothing to divide by.

    Lengths are means over decoding rows, the steps of a request after its prefill. A user's rate is
    tokens per second after the first token.
    """

    requests: int
    tokens: int
    user_rate: float | None  # median over requests
    user_rate_p10: float | None
    ttft: float | None  # seconds from arrival to the first token, median
    ttft_p90: float | None
    verified: float | None  # 1 + admitted
    accepted: float | None  # tokens committed
    trimmed: float | None  # share of the proposed tokens that the target never saw

    @classmethod
    def of(cls, journeys: Sequence[Journey]) -> Self:
        """Raises ValueError for a request that is not finished."""
        usages = [journey.usage for journey in journeys if journey.usage is not None]
        if len(usages) < len(journeys):
            raise ValueError("figures are for finished requests only")
        rates = [
            (usage.completion_tokens - 1) / (journey.finished - journey.first_token)
            for journey, usage in zip(journeys, usages, strict=True)
            if usage.completion_tokens > 1
        ]
        waits = [journey.first_token - journey.arrived for journey in journeys]
        tokens = sum(usage.completion_tokens for usage in usages)
        rows = sum(usage.steps - 1 for usage in usages)
        proposed = sum(usage.proposed for usage in usages)
        admitted = sum(usage.admitted for usage in usages)
        return cls(
            requests=len(journeys),
            tokens=tokens,
            user_rate=_quantile(rates, 0.5),
            user_rate_p10=_quantile(rates, 0.1),
            ttft=_quantile(waits, 0.5),
            ttft_p90=_quantile(waits, 0.9),
            verified=_ratio(rows + admitted, rows),
            accepted=_ratio(tokens - len(journeys), rows),
            trimmed=_ratio(proposed - admitted, proposed),
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """One planner's run."""

    planner: str
    seconds: float  # from the start to the last answer
    throughput: float | None  # tokens per second, all cells together
    steps: int
    drafted: float | None  # share of the steps
    all: Figures
    domains: dict[str, Figures]

    @classmethod
    def of(cls, planner: str, cells: Sequence[CellResult]) -> Self:
        journeys = [journey for cell in cells for journey in cell.journeys]
        steps = sum(cell.steps for cell in cells)
        seconds = max(cell.seconds for cell in cells)
        figures = Figures.of(journeys)
        return cls(
            planner=planner,
            seconds=seconds,
            throughput=_ratio(figures.tokens, seconds),
            steps=steps,
            drafted=_ratio(sum(cell.drafted_steps for cell in cells), steps),
            all=figures,
            domains={
                domain: Figures.of([j for j in journeys if j.domain == domain])
                for domain in dict.fromkeys(journey.domain for journey in journeys)
            },
        )


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if values else None


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
