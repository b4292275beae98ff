"""`dspark evaluate law`: do sampled answers follow the target's own distribution, through all the
processes?

The law of the first tokens of an answer is enumerated from the target's logits, computed by
transformers. Many answers are drawn through the API, and Pearson's chi-square test compares the
two. Plain decoding is tested beside speculation: it fails if the enumeration itself is wrong.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark.bench.load import api
from dspark.bench.system import running_system
from dspark.core.errors import ConfigError, DSparkError
from dspark.core.sampling import transform
from dspark.core.statistics import chi_square_p_value
from dspark.core.types import SamplingParams
from dspark.data.target_files import stop_ids
from dspark.modeling.targets import resolve_target
from dspark.ops.settings import Settings

PLANNERS = ("none", "causal", "capacity", "fixed:2")
LENGTH = 3
"""Tokens looked at. The first comes with the prompt, the others from drafts; an answer is one token
longer, because the last one is never drafted."""

SAMPLING = SamplingParams(temperature=0.9, top_k=6, top_p=0.95)
"""Few outcomes, so that every one of them is drawn often, and all three transforms at work."""

SIGNIFICANCE = 1e-4
"""A p-value below this is taken for a wrong law."""

_AT_ONCE = 2  # requests: few enough that drafting pays
_CHOICES = 4  # answers of a request

Law = dict[tuple[int, ...], float]
"""The first LENGTH tokens of an answer, or fewer if a stop token ends it -> their probability."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What was drawn with one planner."""

    planner: str
    counts: Counter[tuple[int, ...]]  # of the first LENGTH tokens, or fewer, of an answer
    accepted: int  # draft tokens in the answers

    @property
    def tested(self) -> str:
        """What these draws say something about."""
        return "speculation" if self.accepted else "plain decoding"

    def p_value(self, law: Law) -> float:
        """Of counts at least this far from the law. Raises ConfigError for too few draws."""
        outcomes = sorted(law.keys() | self.counts.keys())
        try:
            return chi_square_p_value(
                [self.counts[outcome] for outcome in outcomes],
                [law.get(outcome, 0.0) for outcome in outcomes],
            )
        except ValueError as error:
            raise ConfigError(f"{self.counts.total()} draws: {error}") from error


def draw(
    settings: Settings,
    prompt: str,
    draws: int,
    log_file: Path,
    progress: Callable[[str], None],
) -> list[Draws]:
    """So many answers with each of PLANNERS.

    Raises:
        WorkerUnavailableError: the services could not be started.
        DSparkError: a request failed.
    """
    results = []
    with running_system(settings, PLANNERS, log_file) as urls:
        for planner, url in urls.items():
            results.append(Draws(planner, *asyncio.run(_draw(url, prompt, draws))))
            progress(f"{planner}: {draws} answers, {results[-1].accepted} accepted drafts in them")
    return results


@torch.inference_mode()
def exact_law(settings: Settings, prompt: str, sampling: SamplingParams = SAMPLING) -> Law:
    """By enumeration, in fp32: one forward for every beginning that is possible.

    Raises:
        TargetError: the target cannot be loaded.
    """
    folder = resolve_target(settings.target, settings.cache_dir)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stops = stop_ids(folder, tokenizer.convert_tokens_to_ids)
    prompt_ids = tokenizer(prompt)["input_ids"]
    law: Law = {}
    unfinished: Law = {(): 1.0}
    for _ in range(LENGTH):
        longer: Law = {}
        for tokens, probability in unfinished.items():
            logits = model(torch.tensor([[*prompt_ids, *tokens]])).logits[0, -1]
            p = transform(logits.numpy(), sampling.temperature, sampling.top_k, sampling.top_p)
            for token in np.flatnonzero(p).tolist():
                where = law if token in stops else longer
                where[*tokens, token] = probability * float(p[token])
        unfinished = longer
    return law | unfinished


async def _draw(url: str, prompt: str, draws: int) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each beginning came, and the accepted draft tokens."""
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    waiting = [_CHOICES] * (draws // _CHOICES) + [draws % _CHOICES] * bool(draws % _CHOICES)
    async with api(url) as (client, model):

        async def one_client() -> None:
            nonlocal accepted
            while waiting:
                body = {
                    "model": model,
                    "prompt": prompt,
                    "n": waiting.pop(),
                    "max_tokens": LENGTH + 1,
                    "temperature": SAMPLING.temperature,
                    "top_k": SAMPLING.top_k,
                    "top_p": SAMPLING.top_p,
                    "return_token_ids": True,
                }
                response = await client.post("/v1/completions", json=body)
                if response.status_code != httpx.codes.OK:
                    raise DSparkError(f"the prompt was refused: {response.text}")
                answer = response.json()
                counts.update(tuple(c["token_ids"][:LENGTH]) for c in answer["choices"])
                accepted += answer["usage"]["dspark"]["accepted"]

        await asyncio.gather(*(one_client() for _ in range(_AT_ONCE)))
    return counts, accepted
