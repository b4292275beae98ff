"""Workloads: which requests come, and how good the drafter is at each kind of them."""

import tomllib
from dataclasses import dataclass
from math import log
from typing import Any, Self

import numpy as np

from dspark.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts: log-normal with this mean, cut to 1..longest; `sigma` 0: always the mean."""

    mean: float
    longest: int
    sigma: float = 0.0  # standard deviation of the logarithm

    def __post_init__(self) -> None:
        if not (1 <= self.mean <= self.longest and self.sigma >= 0):
            raise ConfigError(
                f"Lengths need 1 <= mean <= longest and sigma >= 0, got mean {self.mean}, "
                f"longest {self.longest}, sigma {self.sigma}."
            )

    def draw(self, rng: np.random.Generator) -> int:
        value = rng.lognormal(log(self.mean) - self.sigma**2 / 2, self.sigma)
        return int(np.clip(round(value), 1, self.longest))


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of request and the drafter's luck with it.

    Token k of a block is right with probability `acceptance[k]`, given that those before it were.
    Its confidence follows the binormal model of signal detection: the logit is calibrated by
    construction, and ranks a right token above a wrong one with probability `auc`. What the
    drafter reports is `logit_scale` times that logit plus `logit_bias`; 1 and 0: honest.
    """

    name: str
    acceptance: tuple[float, ...]  # [block size] conditional, each in (0, 1)
    auc: float  # of the confidences within a position, in [0.5, 1); 0.5: they know nothing
    prompt: Lengths
    output: Lengths
    share: float = 1.0  # of the requests, relative to the other domains
    logit_scale: float = 1.0
    logit_bias: float = 0.0

    def __post_init__(self) -> None:
        for ok, problem in (
            (bool(self.acceptance), "acceptance must hold a number for each block position"),
            (all(0 < c < 1 for c in self.acceptance), "acceptance must lie between 0 and 1"),
            (0.5 <= self.auc < 1, f"auc must lie in [0.5, 1), not {self.auc}"),
            (self.share > 0, f"share must be positive, not {self.share}"),
        ):
            if not ok:
                raise ConfigError(f"Domain {self.name}: {problem}.")


@dataclass(frozen=True, slots=True)
class Workload:
    """A mix of domains; `source` says where the numbers come from.

    `temperature` above 0: requests are verified in `rejection` mode, so that planners are held to
    its rules; what is accepted is the profile's either way.
    """

    name: str
    source: str
    domains: tuple[Domain, ...]
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if len({len(domain.acceptance) for domain in self.domains}) != 1:
            raise ConfigError(
                f"Workload {self.name} needs domains whose acceptance covers the same block size."
            )

    @property
    def block_size(self) -> int:
        return len(self.domains[0].acceptance)

    @property
    def longest(self) -> int:
        """Most tokens, prompt and output together, that a request can have."""
        return max(domain.prompt.longest + domain.output.longest for domain in self.domains)

    @classmethod
    def from_toml(cls, name: str, text: str) -> Self:
        """Raises ConfigError for a file that is malformed, or has a field missing or unknown."""
        try:
            table = tomllib.loads(text)
            domains = tuple(_domain(name, own) for name, own in table.pop("domains").items())
            return cls(name=name, domains=domains, **table)
        except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"Workload {name} cannot be read: {error!r}.") from error


def _domain(name: str, table: dict[str, Any]) -> Domain:
    fields = table | {
        "acceptance": tuple(table["acceptance"]),
        "prompt": Lengths(**table["prompt"]),
        "output": Lengths(**table["output"]),
    }
    return Domain(name=name, **fields)
