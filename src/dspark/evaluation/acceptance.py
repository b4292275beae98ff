"""`dspark evaluate acceptance`: accepted length on given prompts, beside the 4-gram table's.

The target answers the prompts greedily; drafter and table then draft along its answers, exactly
the rounds that decoding would meet, because a greedy answer is what the target commits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspark.core.types import VerificationMode
from dspark.data import Prompt
from dspark.evaluation.answers import answers
from dspark.evaluation.lookup import Lookup, LookupScore
from dspark.modeling.drafters.checkpoint import load_calibration
from dspark.modeling.targets import Progress, silent
from dspark.training.held_out import Score, draft_greedily, evaluate, table_drafter
from dspark.training.ngram_table import NgramTable
from dspark.training.shards import ResponseCache, Split
from dspark.training.starts import responses as responses_of


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Scores by domain and for "all". `table` is None where no training responses were given."""

    drafter: dict[str, Score]
    without_markov: dict[str, Score]  # the same blocks, their tokens chosen independently
    with_lookup: dict[str, LookupScore]  # the drafter, and prompt lookup where that promises more
    lookup_alone: dict[str, LookupScore]
    table: dict[str, Score] | None


def measure(
    target: str,
    drafter: Path,
    prompts: Sequence[Prompt],
    responses: Path,
    *,
    training_data: Path | None = None,
    max_tokens: int = 128,
    progress: Progress = silent,
) -> Acceptance:
    """Score a drafter. `responses` is where the target's answers are kept, and found again;
    `training_data` is the cache whose training responses the 4-gram table is counted on.

    Raises:
        TargetError, DrafterError: a model cannot be loaded.
        PromptError: a cache cannot be read.
    """
    model, greedy = answers(
        target,
        drafter,
        prompts,
        responses,
        temperatures=(0.0,),
        max_tokens=max_tokens,
        progress=progress,
    )
    size = model.config.block_size

    def score(sequential: bool) -> dict[str, Score]:
        return evaluate(
            greedy, lambda s, at: draft_greedily(model, s, at, sequential=sequential).tokens, size
        )

    table = None
    if training_data is not None:
        counted = NgramTable.fit(responses_of(ResponseCache(training_data, split=Split.TRAIN)))
        table = evaluate(greedy, table_drafter(counted, size), size)
    scaling = load_calibration(drafter, model.config).get(VerificationMode.GREEDY.value)
    return Acceptance(
        drafter=score(sequential=True),
        without_markov=score(sequential=False),
        with_lookup=Lookup(model, scaling).score(greedy),
        lookup_alone=Lookup(None, None).score(greedy),
        table=table,
    )
