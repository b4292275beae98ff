"""Who races in `dspark bench serve`: a planner, and the drafter whose drafts it schedules."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dspark.core.errors import ConfigError
from dspark.core.planner import parse_planner
from dspark.modeling.drafters.checkpoint import resolve_drafter

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

    @classmethod
    def parse(cls, text: str) -> Self:
        """From PLANNER or PLANNER@DRAFTER, or from a contender's name."""
        planner, _, drafter = text.partition("@")
        return cls(planner, drafter)

    @property
    def is_reference(self) -> bool:
        """Whether it is the REFERENCE, with whatever drafter."""
        return self.planner == REFERENCE

    @property
    def is_static(self) -> bool:
        """Whether it verifies alike at any load."""
        return self.planner == BASELINE or self.planner.startswith(("fixed:", "threshold:"))

    def is_static_beside(self, other: Self) -> bool:
        """Whether it is what `other` could have been set to instead: static, with the drafter of
        the other or without any."""
        return self.is_static and (self.planner == BASELINE or self.drafter == other.drafter)


def parse_contenders(texts: Iterable[str]) -> tuple[Contender, ...]:
    """Those of a race.

    Raises:
        ConfigError: there is no such planner, no baseline, or two have one name.
        DrafterError: there is no such drafter.
    """
    contenders = []
    for text in texts:
        contender = Contender.parse(text)
        parse_planner(contender.planner)
        if "@" in text:
            _check_drafter(contender, text)
        contenders.append(contender)
    names = [contender.name for contender in contenders]
    if BASELINE not in names:
        raise ConfigError(f"--planner {BASELINE} is missing: everything is compared with it")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--planner: {twice[0]} is there twice; folders need names of their own")
    return tuple(contenders)


def _check_drafter(contender: Contender, text: str) -> None:
    drafter = contender.drafter
    if contender.planner == BASELINE or drafter == "none" or not Path(drafter).name:
        raise ConfigError(
            f"--planner {text}: behind the @ goes the drafter, a name or a folder, of a planner "
            f"other than {BASELINE}"
        )
    if drafter != "ngram":
        resolve_drafter(drafter)
