"""`dspark evaluate compare`: drafters for one target against each other, on the same answers.

The target answers every prompt greedily and once more at temperature 1; each drafter drafts along,
exactly the rounds that decoding would meet (`dspark.training.calibrate` says how sampled answers
are judged). Intervals are over answers, not over rounds: rounds of one answer are alike. Gains are
over the first drafter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspark.core.reliability import by_position
from dspark.core.statistics import gain_interval, ratio_interval
from dspark.core.types import Scaling, VerificationMode
from dspark.data import Prompt
from dspark.evaluation.answers import answers
from dspark.evaluation.latency import draft_milliseconds, target_milliseconds
from dspark.modeling.drafters.checkpoint import load_calibration, load_config
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.targets import Progress, resolve_target, silent
from dspark.training.calibrate import Ints, Judged, judge
from dspark.training.shards import CachedSequence

TEMPERATURES = {VerificationMode.GREEDY: 0.0, VerificationMode.REJECTION: 1.0}
BATCHES = (1, 4, 16)

_ALL = "all"


@dataclass(frozen=True, slots=True)
class Lengths:
    """How far drafts got, in the answers of one domain."""

    rounds: int
    accepted_length: float  # the target's own token included
    low: float  # of its 95 % interval
    high: float
    conditional: tuple[float, ...]  # acceptance at position k, given that all before it were


@dataclass(frozen=True, slots=True)
class Gain:
    """Accepted length over the first drafter's, less 1; all domains, paired by answer."""

    gain: float
    low: float  # of its 95 % interval
    high: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One drafter."""

    name: str
    method: str
    head: str  # the sequential one
    block_size: int
    layers: int
    parameters: int  # trained ones
    lengths: dict[VerificationMode, dict[str, Lengths]]  # by domain
    gain: dict[VerificationMode, Gain]
    ece: dict[VerificationMode, tuple[float, ...]]  # of survival, calibrated, by position
    draft_ms: dict[int, float]  # by number of sequences in the batch
    target_ms: dict[int, float]  # of the target's pass over their anchors and drafts

    def tokens_per_second(self, batch: int) -> float:
        """Of greedy rounds one after another, nothing but both models counted."""
        length = self.lengths[VerificationMode.GREEDY][_ALL].accepted_length
        return 1e3 * batch * length / (self.draft_ms[batch] + self.target_ms[batch])


def measure(
    target: str,
    drafters: Sequence[Path],
    prompts: Sequence[Prompt],
    responses: Path,
    *,
    batches: Sequence[int] = BATCHES,
    max_tokens: int = 128,
    progress: Progress = silent,
) -> list[Compared]:
    """`responses` is where the target's answers are kept, and found again.

    Raises:
        TargetError, DrafterError: a model cannot be loaded.
        PromptError: the folder of answers cannot be read.
    """
    folder = resolve_target(target, progress=progress)
    sizes = [load_config(drafter, folder).block_size for drafter in drafters]
    target_ms = target_milliseconds(folder, sizes, batches)
    compared: list[Compared] = []
    first: dict[VerificationMode, Sequence[Judged]] = {}
    for drafter in drafters:
        lengths, gain, ece = {}, {}, {}
        for mode, temperature in TEMPERATURES.items():
            model, made = answers(
                target,
                drafter,
                prompts,
                responses,
                temperatures=(temperature,),
                max_tokens=max_tokens,
                progress=progress,
            )
            by_domain = _judged(model, made, mode)
            lengths[mode] = {domain: _lengths(parts) for domain, parts in by_domain.items()}
            everything = by_domain[_ALL]
            gain[mode] = _gain(everything, first.setdefault(mode, everything))
            scaling = load_calibration(drafter, model.config).get(mode.value)
            ece[mode] = _ece(Judged.joined(everything), scaling)
        config = model.config
        compared.append(
            Compared(
                name=drafter.name,
                method=config.method,
                head=config.head_name,
                block_size=config.block_size,
                layers=config.num_hidden_layers,
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                lengths=lengths,
                gain=gain,
                ece=ece,
                draft_ms=draft_milliseconds(model, batches),
                target_ms={batch: target_ms[config.block_size, batch] for batch in batches},
            )
        )
        progress(f"{drafter.name}: {lengths[VerificationMode.GREEDY][_ALL].accepted_length:.2f}")
    return compared


def _judged(
    model: Drafter, made: Sequence[CachedSequence], mode: VerificationMode
) -> dict[str, list[Judged]]:
    """What came of the drafts along each answer, by domain and for all."""
    domains: dict[str, list[CachedSequence]] = {}
    for answer in made:
        domains.setdefault(answer.info.domain, []).append(answer)
    parts = {domain: judge(model, own)[mode] for domain, own in sorted(domains.items())}
    return {**parts, _ALL: [part for own in parts.values() for part in own]}


def _lengths(parts: Sequence[Judged]) -> Lengths:
    committed, rounds = _by_answer(parts)
    low, high = ratio_interval(committed, rounds, np.random.default_rng(0))
    joined = Judged.joined(parts)
    return Lengths(
        rounds=int(rounds.sum()),
        accepted_length=float(committed.sum() / rounds.sum()),
        low=low,
        high=high,
        conditional=_conditional(joined),
    )


def _gain(parts: Sequence[Judged], first: Sequence[Judged]) -> Gain:
    own, other = _by_answer(parts), _by_answer(first)
    low, high = gain_interval(own, other, np.random.default_rng(0))
    ratio = (own[0].sum() / own[1].sum()) / (other[0].sum() / other[1].sum())
    return Gain(float(ratio) - 1, low - 1, high - 1)


def _by_answer(parts: Sequence[Judged]) -> tuple[Ints, Ints]:
    """Tokens committed along each answer, and its rounds."""
    committed = np.array([part.committed.sum() for part in parts])
    return committed, np.array([len(part.committed) for part in parts])


def _conditional(judged: Judged) -> tuple[float, ...]:
    """By position, among the rounds with a verdict on it; nan where none got so far."""
    shares = []
    for k in range(judged.confidence_logits.shape[1]):
        kept = judged.accepted[(judged.judged > k) & (judged.accepted >= k)] > k
        shares.append(float(kept.mean()) if len(kept) else float("nan"))
    return tuple(shares)


def _ece(judged: Judged, scaling: Scaling | None) -> tuple[float, ...]:
    survival = judged.survival(scaling or Scaling.none(judged.confidence_logits.shape[1]))
    return tuple(scores.ece for scores in by_position(survival, judged.accepted, judged.judged))
