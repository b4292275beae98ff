"""Train a drafter: ``python -m dspark.training.fit --data SHARDS --out RUN --minutes 90``.

The same command goes on where the last sitting stopped, whenever that was: a signal costs nothing,
a crash the steps since the last checkpoint. With ``--steps`` the resumed loss curve is that of an
uninterrupted run; with ``--minutes`` rate and block size follow the clock. Several processes share
every batch: ``torchrun --nproc-per-node 2 -m dspark.training.fit ...`` makes the same updates.
"""

import argparse
import json
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, fields
from pathlib import Path

import torch
from rich.console import Console

from dspark.core.errors import ConfigError, DSparkError
from dspark.modeling.targets import resolve_target
from dspark.training import state
from dspark.training.config import CONFIG, PRESETS, FitConfig, add_settings
from dspark.training.dataset import TrainingData
from dspark.training.environment import allow_fast_products, reexec_with_settings
from dspark.training.loop import TeacherForcing, Trainer
from dspark.training.parallel import ALONE, Ranks, joined_ranks
from dspark.training.run_log import RunLog
from dspark.training.shards import ResponseCache, Split
from dspark.training.starts import first_model

_MAY_CHANGE = ("minutes", "steps", "device", "threads", "checkpoint_every", "log_every", "data")


def fit(config: FitConfig, run: Path, console: Console, ranks: Ranks = ALONE) -> bool:
    """Train in folder ``run`` until the configured length or a signal; True if it is complete.

    Every one of several ``ranks`` calls this alike; the first writes.

    Raises:
        ConfigError: the run was started with other settings, or does not fit its data; there is no
            such device.
        PromptError: no response shards yet.
        TargetError, DrafterError: the target cannot be used.
    """
    torch.set_num_threads(config.threads)
    device = ranks.device(config.device)
    target = resolve_target(config.target)
    if ranks.is_first:
        if not (run / state.STATE).exists():
            _start(config, target, run)
        _claim_settings(config, run)
        console.print_json(json.dumps(asdict(config)))
    ranks.wait()

    checkpoint = state.Checkpoint(run)
    progress = checkpoint.progress
    model = checkpoint.model(target).to(device)
    loss_decay = config.block_size if config.loss_decay is None else config.loss_decay
    trainer = Trainer(TeacherForcing(model, config.loss_weights, loss_decay), config.clip, ranks)
    checkpoint.restore_moments(model, trainer.optimizer)
    data = TrainingData(Path(config.data), config.seed, progress.data)
    if data.feature_width != model.fc.in_features:
        raise ConfigError(
            f"{config.data} caches features of width {data.feature_width}, the drafter taps "
            f"{len(config.target_layer_ids)} layers of {model.config.hidden_size}"
        )

    with _log(run, progress, console, config, ranks) as log, _stop_signals() as stopped:
        stopping = False
        while not stopping and (share := config.progress(progress.step, progress.seconds)) < 1:
            began = time.perf_counter()
            rate, block_size = config.schedule.rate(share), config.schedule.block(share)
            batch = data.draw(
                progress.step, config.positions_per_step, config.num_anchors, block_size
            )
            result = trainer.step(batch, rate)
            seconds, stopping = ranks.agreed(time.perf_counter() - began, bool(stopped))
            progress = progress.after(result.positions, seconds, data.position)
            share = config.progress(progress.step, progress.seconds)
            if log is not None:
                log.add(result, progress, share=share, rate=rate, block_size=block_size)
                if progress.step % config.checkpoint_every == 0:
                    state.save(run, model, trainer.optimizer, progress)
        if ranks.is_first:
            state.save(run, model, trainer.optimizer, progress)
    return config.progress(progress.step, progress.seconds) >= 1


def _log(
    run: Path, progress: state.RunProgress, console: Console, config: FitConfig, ranks: Ranks
) -> AbstractContextManager[RunLog | None]:
    """The log of the run, for the process that keeps it."""
    if not ranks.is_first:
        return nullcontext()
    return RunLog(run, progress.step, console, config.log_every)


def _start(config: FitConfig, target: Path, run: Path) -> None:
    """Write the starting point as a checkpoint of step 0, so that there is one way to go on."""
    run.mkdir(parents=True, exist_ok=True)
    model = first_model(config, target, ResponseCache(Path(config.data), split=Split.TRAIN))
    (run / state.DRAFTER).write_text(model.config.to_json())
    config.write(run)
    optimizer = torch.optim.AdamW(model.parameters())
    state.save(run, model, optimizer, state.RunProgress())


def _claim_settings(config: FitConfig, run: Path) -> None:
    """Refuse to go on with settings that would make it another run; record the new length."""
    old = FitConfig.read(run)
    changed = [
        field.name
        for field in fields(config)
        if field.name not in _MAY_CHANGE and getattr(config, field.name) != getattr(old, field.name)
    ]
    if changed:
        raise ConfigError(
            f"the run in {run} was started with another {', '.join(changed)} (see {CONFIG}); "
            "repeat those settings or choose another folder"
        )
    config.write(run)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that fills when SIGINT or SIGTERM asks for an orderly end."""
    received: list[int] = []
    old = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def main() -> int:
    reexec_with_settings()
    allow_fast_products()
    parser = argparse.ArgumentParser(prog="fit", description="Train a drafter.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    add_settings(parser)
    arguments = vars(parser.parse_args())
    run = arguments.pop("out")
    preset = PRESETS[arguments.get("method", "dspark")]
    console = Console(stderr=True)
    try:
        with joined_ranks() as ranks:
            complete = fit(FitConfig(**preset | arguments), run, console, ranks)
    except DSparkError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True)
        return 1
    if ranks.is_first:
        console.print("complete" if complete else "stopped; the same command goes on from here")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
