"""When requests come: a Poisson stream, or users who each send the next request when the last one
is answered."""

from collections import deque
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import numpy as np

from dspark.core.errors import ConfigError


class Load(Protocol):
    """How requests 0..requests-1 reach the cells; request i goes to cell i modulo `cells`."""

    def arrivals(self, requests: int, cell: int, cells: int, seed: int) -> "Arrivals":
        """Those of one cell. Raises ConfigError if the load cannot be dealt to so many cells."""
        ...


class Arrivals:
    """Requests on their way to one cell: `due` in order of time, `later` one for each answer."""

    def __init__(self, due: list[tuple[float, int]], later: range = range(0)) -> None:
        self._due = deque(due)
        self._later = deque(later)

    @property
    def next_time(self) -> float | None:
        """Seconds at which the next request comes; None: nobody is on the way."""
        return self._due[0][0] if self._due else None

    def take(self, now: float) -> list[tuple[float, int]]:
        """The (arrival, request) pairs that are here by `now`."""
        taken = []
        while self._due and self._due[0][0] <= now:
            taken.append(self._due.popleft())
        return taken

    def answered(self, now: float) -> None:
        """A request is done; in a closed loop its user sends another one."""
        if self._later:
            self._due.append((now, self._later.popleft()))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many users in all, each with one request at a time."""

    users: int

    def arrivals(self, requests: int, cell: int, cells: int, seed: int) -> Arrivals:
        if self.users < cells:
            raise ConfigError(f"{self.users} users cannot keep {cells} cells busy: use more users.")
        own = range(cell, requests, cells)
        users = len(range(cell, self.users, cells))
        return Arrivals([(0.0, index) for index in own[:users]], own[users:])


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests per second over all cells, whether they keep up or not."""

    rate: float

    def __post_init__(self) -> None:
        if not (isfinite(self.rate) and self.rate > 0):
            raise ConfigError(f"A request rate must be positive, not {self.rate}.")

    def arrivals(self, requests: int, cell: int, cells: int, seed: int) -> Arrivals:
        gaps = np.random.default_rng((seed, requests)).exponential(1 / self.rate, requests)
        times: list[float] = np.cumsum(gaps).tolist()
        return Arrivals([(times[index], index) for index in range(cell, requests, cells)])
