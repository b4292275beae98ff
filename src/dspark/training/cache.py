"""Put responses that were made elsewhere into the response cache (teacher forcing)."""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dspark.core.errors import PromptError
from dspark.core.types import SamplingParams
from dspark.data import Prompt
from dspark.modeling.backbone import PackedStep, Span
from dspark.modeling.losses import log_normalizer
from dspark.modeling.targets import DEFAULT_TARGET, Progress, resolve_target, silent, to_stderr
from dspark.training.generation import BLOCK_SIZE, Answer, Job, LoadedTarget
from dspark.training.regenerate import RegenerateOptions, cached_sequence
from dspark.training.shards import ShardWriter, finished_tokens

_SAMPLED = SamplingParams(temperature=1.0)  # how the text was drawn is not known


@dataclass(frozen=True, slots=True)
class Response:
    """A finished response of the target; ``text`` is without its end-of-sequence token."""

    prompt: Prompt
    text: str


def cache_responses(
    target: str,
    responses: Iterable[Response],
    out_dir: Path,
    options: RegenerateOptions,
    progress: Progress = silent,
) -> None:
    """Write the responses with the features that the target computes for them.

    They are recorded with temperature 1. Prompts in ``out_dir`` already, and whatever is longer
    than ``options.max_length``, are skipped.

    Raises:
        TargetError: the target cannot be loaded.
    """
    folder = resolve_target(target, progress=progress)
    loaded = LoadedTarget(folder, options.precision, options.tap_layers, options.max_length)
    writer = ShardWriter(out_dir, options.per_shard)
    blocks = range(options.max_length // BLOCK_SIZE)
    done = finished_tokens(out_dir)
    for response in responses:
        job = Job(
            id=response.prompt.id,
            domain=response.prompt.domain,
            prompt_ids=loaded.chat_ids(response.prompt.prompt),
            max_new_tokens=options.max_new_tokens,
            sampling=_SAMPLED,
        )
        tokenized = loaded.tokenizer(response.text, add_special_tokens=False)["input_ids"]
        response_ids = [*tokenized, loaded.tokenizer.eos_token_id]
        ids = job.prompt_ids + response_ids
        if job.id in done or len(ids) > options.max_length:
            continue
        step = PackedStep(torch.tensor(ids[:-1]), (Span(blocks, 0, len(ids) - 1),))
        output = loaded.backbone.forward(step)
        taps, hidden = (
            torch.nn.functional.pad(rows, (0, 0, 0, 1)).bfloat16()
            for rows in (output.taps, output.hidden)
        )
        normalizers = torch.zeros(len(ids))
        scored = range(len(job.prompt_ids) - 1, len(ids) - 1)
        normalizers[scored] = log_normalizer(loaded.head, output.hidden[scored])
        answer = Answer(job, response_ids, "stop", taps, hidden, normalizers)
        writer.add(cached_sequence(answer))
    writer.flush()


def read_responses(file: Path, domain: str) -> Iterator[Response]:
    """Records of a JSON-lines file with ``id``, ``prompt`` and ``response``."""
    for number, line in enumerate(file.read_text("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield Response(Prompt(str(row["id"]), domain, row["prompt"]), row["response"])
        except (ValueError, KeyError, TypeError) as error:
            raise PromptError(
                f"{file}, line {number}: needs an object with id, prompt and response: {error!r}"
            ) from error


def main(arguments: Sequence[str] | None = None) -> None:
    defaults = RegenerateOptions()
    parser = argparse.ArgumentParser(prog="dspark train cache", description=__doc__)
    parser.add_argument("responses", type=Path, help="JSON lines with id, prompt and response")
    parser.add_argument("--domain", default="chat")
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--out", type=Path, required=True, help="folder of the response cache")
    parser.add_argument("--tap-layers", type=int, nargs="+", default=defaults.tap_layers)
    parser.add_argument("--precision", default=defaults.precision)
    given = parser.parse_args(arguments)
    options = replace(defaults, tap_layers=tuple(given.tap_layers), precision=given.precision)
    responses = read_responses(given.responses, given.domain)
    cache_responses(given.target, responses, given.out, options, to_stderr)


if __name__ == "__main__":
    main()
