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
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dspark.bench.system import running_system
from dspark.core.sampling import transform
from dspark.core.statistics import chi_square_p_value
from dspark.core.types import SamplingParams
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
class LawResult:
    planner: str
    draws: int
    outcomes: int
    p_value: float  # of counts at least this far from the law
    accepted: int  # draft tokens in the answers


def measure(
    settings: Settings,
    prompt: str,
    draws: int,
    log_file: Path,
    progress: Callable[[str], None],
) -> list[LawResult]:
    """One result for each of PLANNERS.

    Raises:
        WorkerUnavailableError: the services could not be started.
        TargetError: the target cannot be loaded.
    """
    law = exact_law(resolve_target(settings.target, settings.cache_dir), prompt)
    progress(f"{len(law)} outcomes; drawing {draws} answers with each planner")
    results = []
    with running_system(settings, PLANNERS, log_file) as urls:
        for planner, url in urls.items():
            counts, accepted = asyncio.run(_draw(url, prompt, draws))
            results.append(LawResult(planner, draws, len(law), _p_value(counts, law), accepted))
            progress(f"{planner}: p = {results[-1].p_value:.3g}")
    return results


@torch.inference_mode()
def exact_law(folder: Path, prompt: str) -> Law:
    """By enumeration, in fp32: one forward for every beginning that is possible."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stop = GenerationConfig.from_pretrained(folder).eos_token_id
    stops = {stop} if isinstance(stop, int) else set(stop or ())
    prompt_ids = AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]
    law: Law = {}
    open_: Law = {(): 1.0}
    for _ in range(LENGTH):
        longer: Law = {}
        for tokens, probability in open_.items():
            logits = model(torch.tensor([[*prompt_ids, *tokens]])).logits[0, -1]
            p = transform(logits.numpy(), SAMPLING.temperature, SAMPLING.top_k, SAMPLING.top_p)
            for token in np.flatnonzero(p).tolist():
                where = law if token in stops else longer
                where[*tokens, token] = probability * float(p[token])
        open_ = longer
    return law | open_


async def _draw(url: str, prompt: str, draws: int) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each beginning came, and the accepted draft tokens."""
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    waiting = [_CHOICES] * (draws // _CHOICES) + [draws % _CHOICES] * bool(draws % _CHOICES)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

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
                answer = response.raise_for_status().json()
                counts.update(tuple(c["token_ids"][:LENGTH]) for c in answer["choices"])
                accepted += answer["usage"]["dspark"]["accepted"]

        await asyncio.gather(*(one_client() for _ in range(_AT_ONCE)))
    return counts, accepted


def _p_value(counts: Counter[tuple[int, ...]], law: Law) -> float:
    outcomes = sorted(law.keys() | counts.keys())
    return chi_square_p_value(
        [counts[outcome] for outcome in outcomes], [law.get(outcome, 0.0) for outcome in outcomes]
    )
