"""A run becomes a drafter to serve: ``python -m dspark.training.export --run RUN --out FOLDER``.

The folder gets the bf16 weights without the target's frozen copies, the config, and a model card
whose figures come from the run's log and from the held-out responses.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from dspark.core.errors import DSparkError
from dspark.modeling.drafters.checkpoint import WEIGHTS, load_drafter, save_drafter
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.targets import resolve_target
from dspark.training.config import FitConfig
from dspark.training.environment import reexec_with_settings
from dspark.training.held_out import Score, draft_greedily, evaluate, table_drafter
from dspark.training.ngram_table import NgramTable
from dspark.training.run_log import read_log
from dspark.training.shards import ResponseCache, Split
from dspark.training.starts import responses
from dspark.training.state import Checkpoint, RunProgress

_CURVE_ROWS = 12


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Scores by domain on the same responses."""

    drafter: dict[str, Score]
    table: dict[str, Score]


def export(run: Path, out: Path) -> HeldOut:
    """Write the drafter of ``run`` into ``out`` and return its held-out scores.

    Raises:
        ConfigError: ``run`` is no training run.
        DrafterError, PromptError, TargetError: as reading and writing them does.
    """
    config = FitConfig.read(run)
    checkpoint = Checkpoint(run)
    target = resolve_target(config.target)
    save_drafter(checkpoint.model(target), out)
    size = (out / WEIGHTS).stat().st_size
    model = load_drafter(out, target)  # what is scored is what is shipped
    scores = score(model, Path(config.data))
    save_drafter(model, out, card=card(config, checkpoint.progress, run, scores, size))
    return scores


def score(model: Drafter, data: Path) -> HeldOut:
    """Accepted lengths on the held-out responses of ``data``, the 4-gram table's beside them."""
    size = model.config.block_size
    held_out = ResponseCache(data, split=Split.HELD_OUT)
    table = NgramTable.fit(responses(ResponseCache(data, split=Split.TRAIN)))
    return HeldOut(
        drafter=evaluate(held_out, lambda s, p: draft_greedily(model, s, p).tokens, size),
        table=evaluate(held_out, table_drafter(table, size), size),
    )


def card(
    config: FitConfig, progress: RunProgress, run: Path, scores: HeldOut, weight_bytes: int
) -> str:
    """The model card, in Markdown."""
    cache = ResponseCache(Path(config.data), split=Split.TRAIN)
    tokens: Counter[str] = Counter()
    for sequence in cache:
        tokens[sequence.info.domain] += int(sequence.loss_mask.sum())
    by_domain = ", ".join(f"{domain} {count:,}" for domain, count in sorted(tokens.items()))
    log = read_log(run)
    every = max(1, len(log) // _CURVE_ROWS)
    curve = [
        f"| {r['step']} | {r['seconds'] / 60:.0f} | {r['block_size']} | {r['loss']:.3f} "
        f"| {r['ce']:.3f} | {r['l1']:.3f} | {r['confidence']:.3f} | {r['accepted_length']:.2f} |"
        for r in log[every - 1 :: every]
    ]
    held_out = [
        f"| {domain} | {score.rounds} | {score.accepted_length:.2f} "
        f"| {scores.table[domain].accepted_length:.2f} "
        f"| {' / '.join(f'{share:.2f}' for share in score.acceptance)} |"
        for domain, score in scores.drafter.items()
    ]
    vocabulary = config.draft_vocab_size or "whole"
    return "\n".join(
        [
            f"# A {config.method} drafter for {config.target}",
            "",
            f"{config.num_hidden_layers} layers, block size {config.block_size}, sequential head "
            f"of rank {config.markov_rank}, draft vocabulary {vocabulary}, taps of the target's "
            f"layers {', '.join(map(str, config.target_layer_ids))}; {weight_bytes / 1e6:.1f} MB "
            "in bf16. The target's embedding and head are not included: they come from the target.",
            "",
            "## Training",
            "",
            *_origin(config),
            f"{sum(tokens.values()):,} response tokens that the target wrote itself, half greedy, "
            f"half at temperature 0.7 ({by_domain}); {progress.step:,} steps, "
            f"{progress.positions:,} labels, {progress.seconds / 60:.0f} minutes on "
            f"{_processor(config)}, fp32 (products in bf16 where it has them). "
            f"Loss {_loss(config)}, loss decay "
            f"{config.loss_decay or f'{config.block_size} (the block size)'}.",
            "",
            "| step | minutes | block | loss | CE | L1 | BCE | expected accepted length |",
            "|---|---|---|---|---|---|---|---|",
            *curve,
            "",
            "## Held-out figures",
            "",
            "Greedy accepted length (bonus token included, pooled over rounds) on held-out "
            "prompts, teacher-forced along the target's greedy responses, beside a backoff 4-gram "
            "table counted on the same training responses. The last column is the share of rounds "
            "accepted through each position.",
            "",
            "| domain | rounds | drafter | 4-gram table | accepted through position 1, 2, ... |",
            "|---|---|---|---|---|",
            *held_out,
            "",
        ]
    )


def _loss(config: FitConfig) -> str:
    """The terms that count."""
    weights = {
        "CE": config.ce_weight,
        "soft CE": config.soft_ce_weight,
        "L1": config.l1_weight,
        "BCE": config.confidence_weight,
        "CE among candidates": config.selector_weight,
    }
    return " + ".join(f"{weight:g} {term}" for term, weight in weights.items() if weight)


def _processor(config: FitConfig) -> str:
    """What the last sitting ran on."""
    return f"{config.threads} CPU thread(s)" if config.device == "cpu" else config.device


def _origin(config: FitConfig) -> list[str]:
    """Where the weights come from, if training did not begin with this run."""
    if config.start_from is None:
        return []
    return [
        f"The run went on from the drafter `{Path(config.start_from).name}`; what follows is of "
        "this run alone.",
        "",
    ]


def main() -> int:
    reexec_with_settings()
    parser = argparse.ArgumentParser(prog="export", description="Turn a run into a drafter.")
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the drafter to")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(stderr=True)
    try:
        scores = export(arguments.run, arguments.out)
    except DSparkError as error:
        console.print(f"error: {error}", style="red", soft_wrap=True)
        return 1
    for domain, own in scores.drafter.items():
        console.print(
            f"{domain}: accepted length {own.accepted_length:.2f}, "
            f"4-gram table {scores.table[domain].accepted_length:.2f} ({own.rounds} rounds)"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
