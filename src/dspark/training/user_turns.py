"""User turns written by the target itself: a chat model given only the head of a user message
writes one. They are cheap chat prompts close to what the target was trained on."""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from dspark.core.types import SamplingParams
from dspark.data import Prompt, append_prompt, load_prompts
from dspark.modeling.targets import DEFAULT_TARGET, Progress, resolve_target, silent, to_stderr
from dspark.training.generation import BatchGenerator, Job, LoadedTarget
from dspark.training.prompts import content_hash
from dspark.training.shards import id_hash

_SAMPLING = SamplingParams(temperature=1.0, top_p=0.95)
_MAX_NEW_TOKENS = 112
_PROBE = "\x00"
_OWN_ID = re.compile(r"turn-\d+-(\d+)")


def sample_user_turns(
    target: str,
    wanted: int,
    seed: int = 0,
    batch_size: int = 64,
    precision: str = "auto",
    known: Sequence[Prompt] = (),
    progress: Progress = silent,
) -> Iterator[Prompt]:
    """Sample until ``wanted`` distinct user turns, those in ``known`` among them, pass `is_usable`;
    yield the new ones. Ids are ``turn-<seed>-<n>``, where n goes on behind the known ones.

    Raises:
        TargetError: the target cannot be loaded.
    """
    max_length = 192
    folder = resolve_target(target, progress=progress)
    loaded = LoadedTarget(folder, precision, (), batch_size * max_length)
    prefix = _user_header_ids(loaded)
    generator = BatchGenerator(loaded, batch_size, max_length, with_features=False)
    seen = {content_hash(turn.prompt) for turn in known}
    numbers = [int(own[1]) for turn in known if (own := _OWN_ID.fullmatch(turn.id))]
    answers = generator.run(_jobs(prefix, seed, 1 + max(numbers, default=-1)))
    while len(seen) < wanted:
        answer = next(answers)
        text = str(loaded.tokenizer.decode(answer.response_ids, skip_special_tokens=True)).strip()
        key = content_hash(text)
        if answer.finish == "stop" and is_usable(text) and key not in seen:
            seen.add(key)
            if len(seen) % 100 == 0:
                progress(f"{len(seen)} of {wanted} user turns")
            yield Prompt(answer.job.id, "chat", text)


def is_usable(text: str) -> bool:
    """15 to 400 characters that end like a sentence, mostly ASCII, no line twice."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (
        15 <= len(text) <= 400
        and (text[-1].isalnum() or text[-1] in ".?!\"')]}:`")
        and sum(character.isascii() for character in text) >= 0.97 * len(text)
        and len(set(lines)) == len(lines)
    )


def _user_header_ids(loaded: LoadedTarget) -> list[int]:
    """The chat prompt up to where the user's words begin."""
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": _PROBE}], tokenize=False
    )
    prefix = str(text).split(_PROBE)[0]
    return list(loaded.tokenizer(prefix, add_special_tokens=False)["input_ids"])


def _jobs(prefix: list[int], seed: int, start: int) -> Iterator[Job]:
    for number in count(start):
        name = f"turn-{seed}-{number:05d}"
        sampling = replace(_SAMPLING, nonce=id_hash(name, "sampling"))
        yield Job(name, "chat", prefix, _MAX_NEW_TOKENS, sampling)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="dspark train user-turns", description=__doc__)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file; it is added to")
    given = parser.parse_args(arguments)
    if given.out.suffix != ".jsonl":
        parser.error(f"--out must be a .jsonl file, not {given.out}")
    torch.set_num_threads(given.threads)
    begun = given.out.exists() and given.out.stat().st_size > 0
    known = load_prompts(str(given.out)) if begun else []
    turns = sample_user_turns(
        given.target, given.count, given.seed, known=known, progress=to_stderr
    )
    for turn in turns:  # each as soon as it is there: a stopped run goes on from here
        append_prompt(given.out, turn)


if __name__ == "__main__":
    main()
