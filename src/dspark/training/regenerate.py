"""Let the target answer the training prompts, and keep what it computes on the way.

A drafter learns to predict *this* target, so its training text is the target's own. The forward
passes that generate a response already hold every feature that training needs; they are written
to the response cache as they are made, and no second pass follows.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark.core.types import SamplingParams
from dspark.data import load_prompts
from dspark.modeling.devices import resolve_device
from dspark.modeling.targets import DEFAULT_TARGET, Progress, resolve_target, silent, to_stderr
from dspark.training.generation import BLOCK_SIZE, Answer, BatchGenerator, Job, LoadedTarget
from dspark.training.prompt_queue import PromptQueue, Source
from dspark.training.prompts import exclude, hashes
from dspark.training.shards import (
    CachedSequence,
    SequenceInfo,
    ShardWriter,
    Split,
    finished_tokens,
    id_hash,
    split_of,
)


@dataclass(frozen=True, slots=True)
class RegenerateOptions:
    temperatures: tuple[float, ...] = (0.0, 0.7)  # one for each prompt, chosen by a hash of its id
    max_new_tokens: int = 320
    max_prompt_tokens: int = 384  # longer prompts are skipped
    batch_size: int = 64
    tap_layers: tuple[int, ...] = (1, 14, 27)
    precision: str = "auto"
    device: str = "cpu"
    seed: int = 0
    worker: tuple[int, int] = (0, 1)  # (index, count): this process takes its share of the prompts
    per_shard: int = 64

    @property
    def max_length(self) -> int:
        """Prompt + response, rounded up to whole KV blocks."""
        tokens = self.max_prompt_tokens + self.max_new_tokens
        return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def regenerate(
    target: str,
    sources: Sequence[Source],
    out_dir: Path,
    options: RegenerateOptions,
    progress: Progress = silent,
) -> None:
    """Answer the prompts and write the response cache into ``out_dir``.

    Prompts answered there before are skipped and count towards the budgets, so a killed run goes
    on where it was. Run several one-threaded workers at once for the best use of a CPU.

    Raises:
        TargetError: the target cannot be loaded.
        ConfigError: there is no such device.
    """
    folder = resolve_target(target, progress=progress)
    kv_tokens = options.batch_size * options.max_length
    device = resolve_device(options.device)
    loaded = LoadedTarget(folder, options.precision, options.tap_layers, kv_tokens, device)
    generator = BatchGenerator(loaded, options.batch_size, options.max_length)
    typical = options.max_new_tokens // 2
    done = finished_tokens(out_dir)
    queue = PromptQueue(sources, done, typical, options.worker, progress)
    writer = ShardWriter(out_dir, options.per_shard)
    try:
        for answer in generator.run(_jobs(loaded, queue, options)):
            writer.add(cached_sequence(answer))
            queue.finish(answer.job.domain, len(answer.response_ids))
    finally:  # finished answers outlive whatever stops this
        writer.flush()


def _jobs(loaded: LoadedTarget, queue: PromptQueue, options: RegenerateOptions) -> Iterator[Job]:
    for domain, prompt in queue:
        ids = loaded.chat_ids(prompt.prompt)
        if len(ids) > options.max_prompt_tokens:
            queue.finish(domain, 0)
            continue
        choice = id_hash(prompt.id, "temperature") % len(options.temperatures)
        nonce = id_hash(prompt.id, f"sampling-{options.seed}")
        sampling = SamplingParams(temperature=options.temperatures[choice], nonce=nonce)
        yield Job(prompt.id, domain, ids, options.max_new_tokens, sampling)


def cached_sequence(answer: Answer) -> CachedSequence:
    """The cache's record of an answer that carries its features."""
    job = answer.job
    assert answer.taps is not None
    assert answer.hidden is not None
    assert answer.log_normalizer is not None
    mask = [0] * len(job.prompt_ids) + [1] * len(answer.response_ids)
    info = SequenceInfo(
        job.id, job.domain, job.sampling.temperature, split_of(job.id), answer.finish
    )
    return CachedSequence(
        info=info,
        ids=torch.tensor(job.prompt_ids + answer.response_ids, dtype=torch.int32),
        loss_mask=torch.tensor(mask, dtype=torch.uint8),
        taps=answer.taps,
        hidden=answer.hidden,
        log_normalizer=answer.log_normalizer,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    defaults = RegenerateOptions()
    parser = argparse.ArgumentParser(prog="dspark train regenerate", description=__doc__)
    add = parser.add_argument
    add("--target", default=DEFAULT_TARGET, help="name, folder or Hugging Face id")
    add("--out", type=Path, required=True, help="folder of the response cache")
    add(
        "--source",
        nargs=3,
        action="append",
        required=True,
        metavar=("DOMAIN", "PROMPTS", "TOKENS"),
        help="JSON-lines file or data set id, and the response tokens wanted; repeatable",
    )
    add("--exclude", action="append", default=[], help="prompts that must not be used; repeatable")
    add("--batch-size", type=int, default=defaults.batch_size)
    add("--max-new-tokens", type=int, default=defaults.max_new_tokens)
    add(
        "--temperatures",
        type=float,
        nargs="+",
        default=defaults.temperatures,
        help="one for each prompt, chosen by a hash of its id",
    )
    add(
        "--held-out-only",
        action="store_true",
        help="answer only the prompts that training leaves out, for calibration",
    )
    add("--tap-layers", type=int, nargs="+", default=defaults.tap_layers)
    add("--precision", default=defaults.precision)
    add("--device", default=defaults.device, help="cpu or cuda")
    add("--threads", type=int, default=1)
    add("--worker", type=int, nargs=2, default=(0, 1), metavar=("INDEX", "COUNT"))
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    forbidden = frozenset().union(*(hashes(load_prompts(name)) for name in given.exclude))
    sources = []
    for domain, name, tokens in given.source:
        prompts = exclude(load_prompts(name), forbidden)
        if given.held_out_only:
            prompts = [prompt for prompt in prompts if split_of(prompt.id) is Split.HELD_OUT]
        sources.append(Source(domain, prompts, int(tokens)))
    options = RegenerateOptions(
        batch_size=given.batch_size,
        max_new_tokens=given.max_new_tokens,
        temperatures=tuple(given.temperatures),
        tap_layers=tuple(given.tap_layers),
        precision=given.precision,
        device=given.device,
        worker=tuple(given.worker),
    )
    regenerate(given.target, sources, given.out, options, to_stderr)


if __name__ == "__main__":
    main()
