"""The target's answers to evaluation prompts, made once and kept."""

from collections.abc import Sequence
from pathlib import Path

import transformers

from dspark.data import Prompt
from dspark.modeling.drafters.checkpoint import load_drafter
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.targets import Progress, resolve_target
from dspark.training.prompt_queue import Source
from dspark.training.regenerate import RegenerateOptions, regenerate
from dspark.training.shards import CachedSequence, ResponseCache


def answers(
    target: str,
    drafter: Path,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    temperatures: tuple[float, ...],
    max_tokens: int,
    progress: Progress,
) -> tuple[Drafter, list[CachedSequence]]:
    """The drafter, and its target's answers to these prompts, each at one of the temperatures, with
    the features it taps; from ``folder`` as far as they are there, which may hold others too.

    Raises:
        TargetError, DrafterError: a model cannot be loaded.
        PromptError: the folder cannot be read.
    """
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    target_folder = resolve_target(target, progress=progress)
    model = load_drafter(drafter, target_folder).eval()
    options = RegenerateOptions(
        temperatures=temperatures,
        max_new_tokens=max_tokens,
        max_prompt_tokens=1024,
        batch_size=16,
        tap_layers=model.config.target_layer_ids,
    )
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    sources = [Source(domain, own) for domain, own in domains.items()]
    alike = folder / f"temperature-{'-'.join(f'{value:g}' for value in temperatures)}"
    regenerate(str(target_folder), sources, alike, options, progress)
    asked = {prompt.id for prompt in prompts}
    return model, [answer for answer in ResponseCache(alike) if answer.info.id in asked]
