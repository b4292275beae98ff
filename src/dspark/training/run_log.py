"""What a training run says of itself: ``log.jsonl``, and one line in the terminal."""

import json
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.status import Status

from dspark.training.loop import StepResult
from dspark.training.state import RunProgress

LOG = "log.jsonl"

MEANS = ("loss", "ce", "l1", "confidence", "accepted_length", "gradient_norm")
"""Fields of StepResult that a record averages over its steps."""

_PRINT_SECONDS = 30.0


def read_log(run: Path) -> list[dict[str, Any]]:
    path = run / LOG
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class RunLog:
    """Appends a record, the mean of its steps, every ``every`` steps. A terminal shows the newest
    in place, a plain stream one every 30 seconds."""

    def __init__(self, run: Path, last_step: int, console: Console, every: int) -> None:
        """Drops records after ``last_step``, which a crash left behind and this run will redo."""
        self._console = console
        self._every = every
        self._status = Status("starting", console=console)
        self._printed = 0.0
        self._window: list[StepResult] = []
        self._window_began = time.perf_counter()
        kept = [record for record in read_log(run) if record["step"] <= last_step]
        (run / LOG).write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._file = (run / LOG).open("a", buffering=1)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()
        self._file.close()

    def add(
        self,
        result: StepResult,
        progress: RunProgress,
        *,
        share: float,
        rate: float,
        block_size: int,
    ) -> None:
        """share: of the whole run, with this step, in (0, 1]."""
        self._window.append(result)
        if progress.step % self._every:
            return
        now = time.perf_counter()
        positions = sum(result.positions for result in self._window)
        record = {
            "step": progress.step,
            "progress": share,
            "seconds": progress.seconds,
            "epoch": progress.data.epoch,
            "rate": rate,
            "block_size": block_size,
            **{
                name: sum(getattr(r, name) for r in self._window) / len(self._window)
                for name in MEANS
            },
            "positions_per_second": positions / (now - self._window_began),
        }
        self._window, self._window_began = [], now
        self._file.write(json.dumps(record) + "\n")
        self._show(record, eta_seconds=progress.seconds * (1 / share - 1))

    def _show(self, record: dict[str, Any], eta_seconds: float) -> None:
        line = (
            f"step {record['step']}  {record['progress']:.1%}  loss {record['loss']:.3f} "
            f"(ce {record['ce']:.3f}, l1 {record['l1']:.3f}, conf {record['confidence']:.3f})  "
            f"accepted length {record['accepted_length']:.2f}  "
            f"{record['positions_per_second']:.0f} positions/s  {eta_seconds / 60:.0f} min left"
        )
        if self._console.is_terminal:
            self._status.update(line)
        elif time.monotonic() - self._printed >= _PRINT_SECONDS:
            self._printed = time.monotonic()
            self._console.print(line, soft_wrap=True)
