"""What a 4-gram table would have drafted along served answers: the least a drafter must beat."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from dspark.bench.load import Answer
from dspark.modeling.drafters.checkpoint import load_config, resolve_drafter
from dspark.modeling.targets import resolve_target
from dspark.ops.settings import Settings
from dspark.training.generation import chat_ids
from dspark.training.held_out import Score, evaluate, table_drafter
from dspark.training.ngram_table import NgramTable
from dspark.training.shards import CachedSequence, ResponseCache, SequenceInfo, Split
from dspark.training.starts import responses


def table_scores(
    settings: Settings, training_data: Path, answers: Sequence[Answer]
) -> dict[str, Score]:
    """By domain and for "all", with blocks as long as the drafter's. The answers are greedy, and
    ``training_data`` is the response cache whose training responses the table is counted on.

    Raises:
        PromptError: the cache cannot be read.
    """
    target = resolve_target(settings.target, settings.cache_dir)
    block_size = load_config(resolve_drafter(settings.drafter), target).block_size
    table = NgramTable.fit(responses(ResponseCache(training_data, split=Split.TRAIN)))
    tokenizer = AutoTokenizer.from_pretrained(target)
    sequences = (_sequence(answer, tokenizer) for answer in answers)
    return evaluate(sequences, table_drafter(table, block_size), block_size)


def _sequence(answer: Answer, tokenizer: Any) -> CachedSequence:
    """The answer as the cache would hold it, without features: a table needs none."""
    prompt_ids = chat_ids(tokenizer, answer.prompt.prompt)
    ids = torch.tensor([*prompt_ids, *answer.token_ids], dtype=torch.int32)
    mask = (torch.arange(len(ids)) >= len(prompt_ids)).to(torch.uint8)
    nothing = torch.empty(len(ids), 0, dtype=torch.bfloat16)
    info = SequenceInfo(answer.prompt.id, answer.prompt.domain, 0.0, Split.HELD_OUT, "length")
    return CachedSequence(info, ids, mask, nothing, nothing, torch.zeros(len(ids)))
