"""`dspark evaluate acceptance`: accepted length on given prompts, beside the 4-gram table's.

The target answers the prompts greedily; drafter and table then draft along its answers, exactly
the rounds that decoding would meet, because a greedy answer is what the target commits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.data import Prompt
from dspark.modeling.drafters.checkpoint import load_drafter
from dspark.modeling.targets import Progress, resolve_target, silent
from dspark.training.held_out import Score, draft_greedily, evaluate, table_drafter
from dspark.training.ngram_table import NgramTable
from dspark.training.prompt_queue import Source
from dspark.training.regenerate import RegenerateOptions, regenerate
from dspark.training.shards import ResponseCache
from dspark.training.starts import responses as responses_of


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Scores by domain and for "all". `table` is None where no training responses were given."""

    drafter: dict[str, Score]
    table: dict[str, Score] | None


def measure(
    target: str,
    drafter: Path,
    prompts: Sequence[Prompt],
    responses: Path,
    *,
    training_data: Path | None = None,
    max_tokens: int = 128,
    precision: str = "auto",
    progress: Progress = silent,
) -> Acceptance:
    """Score a drafter. `responses` is where the target's answers are kept, and found again;
    `training_data` is the cache whose training responses the 4-gram table is counted on.

    Raises:
        TargetError, DrafterError: a model cannot be loaded.
        PromptError: a cache cannot be read.
    """
    folder = resolve_target(target, progress=progress)
    model = load_drafter(drafter, folder).eval()
    options = RegenerateOptions(
        temperatures=(0.0,),
        max_new_tokens=max_tokens,
        max_prompt_tokens=1024,
        batch_size=16,
        tap_layers=model.config.target_layer_ids,
        precision=precision,
    )
    regenerate(str(folder), _by_domain(prompts), responses, options, progress)
    answers = ResponseCache(responses)
    size = model.config.block_size
    by_drafter = evaluate(answers, lambda s, at: draft_greedily(model, s, at).tokens, size)
    if training_data is None:
        return Acceptance(by_drafter, None)
    table = NgramTable.fit(responses_of(ResponseCache(training_data, split="train")))
    return Acceptance(by_drafter, evaluate(answers, table_drafter(table, size), size))


def _by_domain(prompts: Iterable[Prompt]) -> list[Source]:
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    return [Source(domain, own) for domain, own in domains.items()]
