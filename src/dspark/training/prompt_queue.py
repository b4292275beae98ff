"""Which prompt to answer next, and how far along the run is."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dspark.data import Prompt
from dspark.modeling.targets import Progress, silent
from dspark.training.shards import id_hash

_REPORT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Source:
    """The prompts of one domain and how many response tokens to make of them (None: all)."""

    domain: str
    prompts: Sequence[Prompt]
    max_tokens: int | None = None


class PromptQueue:
    """Hands out the next prompt of the domain that is furthest behind its budget.

    So the domains advance together, and a run that is cut short holds all of them. Several
    workers share the prompts by a hash of their ids.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        done: Mapping[str, int],
        typical_tokens: int,
        worker: tuple[int, int] = (0, 1),
        progress: Progress = silent,
    ) -> None:
        """``done``: response tokens of each prompt id answered before, which count towards the
        budgets. ``typical_tokens``: what an open prompt is expected to give. ``worker``: (index,
        count)."""
        index, count = worker
        self._typical = typical_tokens
        self._progress = progress
        self._waiting: dict[str, Iterator[Prompt]] = {}
        self._budget: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._open: dict[str, int] = {}
        for source in sources:
            mine = [p for p in source.prompts if id_hash(p.id, "worker") % count == index]
            self._waiting[source.domain] = iter([p for p in mine if p.id not in done])
            self._budget[source.domain] = (source.max_tokens or sys.maxsize) / count
            self._tokens[source.domain] = sum(done.get(p.id, 0) for p in mine)
            self._open[source.domain] = 0
        self._before = sum(self._tokens.values())
        self._began = self._reported = time.monotonic()

    def __iter__(self) -> Iterator[tuple[str, Prompt]]:
        """(domain, prompt) pairs; how many depends on what `finish` is told meanwhile."""
        while behind := [d for d in self._waiting if self._promised(d) < self._budget[d]]:
            domain = min(behind, key=lambda d: self._promised(d) / self._budget[d])
            prompt = next(self._waiting[domain], None)
            if prompt is None:
                del self._waiting[domain]
            else:
                self._open[domain] += 1
                yield domain, prompt

    def finish(self, domain: str, tokens: int) -> None:
        """A prompt handed out for ``domain`` is done and gave this many tokens."""
        self._open[domain] -= 1
        self._tokens[domain] += tokens
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            self._progress(self._report(now - self._began))

    def _report(self, seconds: float) -> str:
        total = sum(self._tokens.values())
        rate = (total - self._before) / seconds
        parts = ", ".join(f"{domain} {tokens:,}" for domain, tokens in self._tokens.items())
        line = f"{total:,} response tokens ({parts}), {rate:.0f} tok/s"
        left = sum(self._budget.values()) - total
        return f"{line}, {left / rate / 60:.0f} min left" if rate and left < 1e9 else line

    def _promised(self, domain: str) -> float:
        return self._tokens[domain] + self._open[domain] * self._typical
