"""What a step costs, in seconds, as a function of what is put into it.

A target step is modelled as `tokens(B) + head_row_seconds * H + context_token_seconds * C`: B rows
through the layers, H of them through the LM head, C context tokens read by attention (summed over
the requests). Drafting costs `draft(R)`; `overhead_seconds` is what a step spends outside both
models. The numbers come from timing real steps on the machine that serves.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dspark.core.errors import ConfigError
from dspark.core.types import ProfileShape

Count: TypeAlias = int | NDArray[np.int64]
Seconds: TypeAlias = NDArray[np.float64]

SHORTEST = 1e-6  # seconds; keeps a curve positive where noise exceeds what a tiny model costs


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is valid for; one that was measured under another key is refused."""

    target_digest: str
    drafter_digest: str  # "" without a drafter
    device: str
    precision: str
    threads: int
    transport: str = "grpc"  # to the workers: part of what a step spends outside them

    def digest(self) -> str:
        """Hex sha256 over all fields, to name a stored profile by."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Curve:
    """Non-decreasing seconds over a count; constant below its grid.

    Piecewise linear, or `tiered`: a device that runs captured graphs pads every batch to the next
    size it has a graph for, so that the curve jumps behind each of `counts` and is flat up to it.
    Beyond the grid both go on with the last slope, or with the mean slope where that is steeper: a
    last segment that noise made flat must not make large batches free.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    tiered: bool = False

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.seconds) or len(self.counts) < 2:
            raise ConfigError(
                f"A cost curve needs a time for each of at least two sizes, got "
                f"{len(self.counts)} sizes and {len(self.seconds)} times: profile more sizes."
            )
        if self.counts[0] < 0 or any(b <= a for a, b in pairwise(self.counts)):
            raise ConfigError(f"The sizes of a cost curve must rise from 0 or more: {self.counts}.")
        if not np.all(np.isfinite(self.seconds)) or self.seconds[0] < 0:
            raise ConfigError(
                f"The times of a cost curve must be finite and not negative: {self.seconds}."
            )
        if any(b < a for a, b in pairwise(self.seconds)):
            raise ConfigError(f"The times of a cost curve must not fall: {self.seconds}.")

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Self:
        """The curve through measured (count, seconds): the mean of equal counts, then the running
        maximum, because more work in less time can only be noise."""
        counts = sorted({count for count, _ in points})
        means = [float(np.mean([s for c, s in points if c == count])) for count in counts]
        rising = np.maximum.accumulate(np.maximum(means, SHORTEST)) if means else np.array([])
        return cls(tuple(counts), tuple(rising.tolist()))

    def __call__(self, count: Count) -> Seconds:
        x, y = np.asarray(self.counts), np.asarray(self.seconds)
        within: Seconds
        if self.tiered:
            within = np.asarray(y[np.minimum(np.searchsorted(x, count), len(x) - 1)])
        else:
            within = np.asarray(np.interp(count, x, y))
        slope = max((y[-1] - y[-2]) / (x[-1] - x[-2]), (y[-1] - y[0]) / (x[-1] - x[0]))
        beyond = np.maximum(np.asarray(count) - x[-1], 0)
        return np.asarray(within + slope * beyond)

    def between(self, start: int, stop: int) -> Seconds:
        """Of start, start + 1, ..., stop - 1, read-only: looked up, which is what a search over
        every batch size of every step needs."""
        return _table(self, 1 << (stop - 1).bit_length())[start:stop]


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost surface of one deployment: fitted by `from_profile`, or given, in a simulation."""

    tokens: Curve
    draft: Curve | None = None  # None: nothing drafts here
    head_row_seconds: float = 0.0
    context_token_seconds: float = 0.0
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("head_row_seconds", "context_token_seconds", "overhead_seconds"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ConfigError(f"The cost model's {name} must be finite and >= 0, got {value}.")

    @classmethod
    def from_profile(
        cls,
        verify: Sequence[tuple[ProfileShape, float]],
        draft: Sequence[tuple[int, float]] = (),
        overhead_seconds: float = 0.0,
    ) -> Self:
        """Fits the surface to timed target steps and to timed draft calls (requests, seconds).

        The head and context slopes come from shapes that share `batch_tokens` and differ otherwise
        (least squares within each group, not below 0); a slope that nothing varied stays 0, its
        cost then being part of `tokens`. Raises ConfigError for fewer than two batch sizes or
        times that are not finite.
        """
        shapes = [shape for shape, _ in verify]
        batch = np.array([shape.batch_tokens for shape in shapes])
        terms = np.array([(s.head_rows, s.requests * s.context) for s in shapes], dtype=np.float64)
        terms = terms.reshape(len(shapes), 2)
        seconds = np.array([time for _, time in verify])
        if not np.all(np.isfinite(seconds)):
            raise ConfigError("A timed target step is not a finite number: profile again.")
        slopes = np.maximum(_slopes_within(batch, terms, seconds), 0.0)
        rest = seconds - terms @ slopes
        return cls(
            tokens=Curve.through(list(zip(batch.tolist(), rest.tolist(), strict=True))),
            draft=Curve.through(draft) if draft else None,
            head_row_seconds=float(slopes[0]),
            context_token_seconds=float(slopes[1]),
            overhead_seconds=overhead_seconds,
        )

    def missing(self, *, drafter: bool) -> str:
        """Why plans cannot rest on this surface, in words; empty if they can. `drafter`: there is
        one to be asked, so what that costs has to be known."""
        if self.head_row_seconds == 0 and self.tokens.seconds[0] == self.tokens.seconds[-1]:
            return "the cost profile is flat: a large step seems as fast as a small one"
        if drafter and self.draft is None:  # drafts would seem to be free
            return "the drafter's cost is not known"
        return ""

    def draft_seconds(self, requests: int) -> float:
        """Seconds of one draft call for `requests` sequences; 0 where nothing drafts."""
        if self.draft is None or requests == 0:
            return 0.0
        return float(self.draft.between(requests, requests + 1)[0])

    def verify_seconds(self, batch_tokens: Count, head_rows: Count, context_tokens: int) -> Seconds:
        """Seconds of one target step; counts broadcast. Never falls as `batch_tokens` grows."""
        return (
            self.tokens(batch_tokens)
            + self.head_row_seconds * np.asarray(head_rows)
            + self.context_token_seconds * context_tokens
        )

    def verify_seconds_of_more(
        self, batch_tokens: int, head_rows: int, context_tokens: int, more: int
    ) -> Seconds:
        """`verify_seconds` of a step with 0, 1, ..., `more` further rows, each of which needs
        logits, [more + 1]."""
        return (
            self.tokens.between(batch_tokens, batch_tokens + more + 1)
            + self.head_row_seconds * np.arange(head_rows, head_rows + more + 1)
            + self.context_token_seconds * context_tokens
        )

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The surface whose fields these are, as `asdict` and JSON give them. Raises KeyError or
        TypeError for other fields, ConfigError for values that make no surface."""
        draft = None if fields["draft"] is None else _read_curve(fields["draft"])
        return cls(**fields | {"tokens": _read_curve(fields["tokens"]), "draft": draft})

    def to_json(self, key: ProfileKey) -> str:
        return json.dumps({"key": asdict(key), "cost": asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str, key: ProfileKey) -> Self:
        """Reads what `to_json` wrote. Raises ConfigError if it is malformed or measured for
        something else than `key`, naming the fields that differ."""
        try:
            stored = json.loads(text)
            measured_for, surface = ProfileKey(**stored["key"]), cls.from_fields(stored["cost"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"The cost profile cannot be read ({error!r}): delete it.") from error
        differing = [
            name for name, value in asdict(key).items() if getattr(measured_for, name) != value
        ]
        if differing:
            raise ConfigError(
                f"The cost profile was measured with another {', '.join(differing)}: profile again."
            )
        return surface


def _slopes_within(
    groups: NDArray[np.int64], terms: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least-squares slope of `seconds` [N] over each of `terms` [N, T], using only differences
    between members of the same group [N]; 0 for a term that never varies inside a group."""
    same = groups[:, None] == groups
    average = same / same.sum(axis=1, keepdims=True)
    slopes, *_ = np.linalg.lstsq(terms - average @ terms, seconds - average @ seconds)
    return np.asarray(slopes, dtype=np.float64)


@lru_cache(maxsize=8)
def _table(curve: Curve, size: int) -> Seconds:
    """A curve's seconds of 0..size - 1."""
    table = curve(np.arange(size))
    table.flags.writeable = False
    return table


def _read_curve(stored: dict[str, Any]) -> Curve:
    return Curve(**stored | {name: tuple(stored[name]) for name in ("counts", "seconds")})
