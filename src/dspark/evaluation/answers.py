"""The target's answers to evaluation prompts, made once and kept."""

from collections.abc import Sequence
from pathlib import Path

from dspark.data import Prompt
from dspark.modeling.drafters.dspark import DSparkModel
from dspark.modeling.targets import Progress
from dspark.training.prompt_queue import Source
from dspark.training.regenerate import RegenerateOptions, regenerate
from dspark.training.shards import ResponseCache


def answers(
    target: Path,
    model: DSparkModel,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    temperatures: tuple[float, ...],
    max_tokens: int,
    progress: Progress,
) -> ResponseCache:
    """Answers with the features that ``model`` taps, from ``folder`` as far as they are there.

    Raises:
        TargetError: the target cannot be loaded.
        PromptError: the folder cannot be read.
    """
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
    regenerate(str(target), sources, folder, options, progress)
    return ResponseCache(folder)
