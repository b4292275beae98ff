"""Who races in `dspark bench serve`: a planner, and the drafter whose drafts it schedules."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dspark.core.errors import ConfigError
from dspark.core.planner import parse_planner

BASELINE = "none"
REFERENCE = "fixed:1"
"""One draft token, always verified: what production systems run as multi-token prediction."""


@dataclass(frozen=True, slots=True)
class Contender:
    planner: str
    drafter: str  # a name or a folder; empty: the one of the settings

    @property
    def name(self) -> str:
        """In results: without the folders above the drafter."""
        return f"{self.planner}@{Path(self.drafter).name}" if self.drafter else self.planner


def parse_contenders(texts: Iterable[str]) -> tuple[Contender, ...]:
    """From PLANNER or PLANNER@DRAFTER each.

    Raises:
        ConfigError: there is no such planner, no baseline, or two have one name.
    """
    contenders = []
    for text in texts:
        planner, at, drafter = text.partition("@")
        parse_planner(planner)
        if at and (not drafter or planner == BASELINE):
            raise ConfigError(
                f"--planner {text}: behind the @ goes the drafter of a planner other than none"
            )
        contenders.append(Contender(planner, drafter))
    names = [contender.name for contender in contenders]
    if BASELINE not in names:
        raise ConfigError(f"--planner {BASELINE} is missing: everything is compared with it")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--planner: {twice[0]} is there twice; folders need names of their own")
    return tuple(contenders)


def is_reference(name: str) -> bool:
    """Whether this contender is the REFERENCE, with whatever drafter."""
    return _planner(name) == REFERENCE


def is_static(name: str) -> bool:
    """Whether this contender verifies alike at any load."""
    return _planner(name).startswith((BASELINE, "fixed:", "threshold:"))


def _planner(name: str) -> str:
    return name.partition("@")[0]
