"""Many sampled answers to one prompt through the three services, and the law they have to follow.

What is drawn depends on the models, the request numbers and the run's parameters alone: a run is
repeated exactly by the next one, on any machine that rounds alike.
"""

import asyncio
import gc
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from dspark_services.models import load_draft_worker, load_target_worker
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import Planner
from dspark.core.sampling import transform
from dspark.core.types import DraftSource, SamplingParams
from dspark.engine.admission import Limits
from dspark.modeling.drafters.checkpoint import load_drafter, save_drafter
from dspark.modeling.head import LocalHead
from dspark.ops.settings import Settings, load_settings
from tests.support.drafters import METHODS, model_on
from tests.support.system import Recorder, collect, request, running_driver, until
from tests.support.tiny import tiny_drafter, tiny_target
from tests.support.workers import drafter_port, verifier_port

PROMPT = (1, 5, 2)
EVERY_TOKEN = (3, 8, 1, 5, 2, 7, 9, 0, 4, 6, 10, 11, 8, 5, 3, 0, 7)  # whatever comes, it was there
REPEATED = (3, 4, 5, 8, 9, 6, 3, 4, 5)  # if 8 comes, it may go on as before: 9 is likely too
# The first token comes with the prefill; room for one more than is looked at lets the second and
# the third come from a block of two.
MAX_TOKENS, LOOKED_AT = 4, 3
VOCAB = 12
BIAS = 0.02

RUNNING = 512
LIMITS = Limits(RUNNING, max_prefill_tokens=8 * RUNNING, max_batch_tokens=8 * RUNNING)
# The first three rows cost what they do in the paper's counter-example, 1 : 1/0.5 : 1/0.45, which
# tempts whoever plans for one request; over hundreds of rows it pays to trim the unlikely tokens.
COST = StepCost(
    tokens=Curve((1, 2, 3, 2000), (0.03, 0.03 / 0.5, 0.03 / 0.45, 0.26)),
    draft=Curve((1, 1000), (1e-4, 2e-3)),
)
# Half as many drafts as requests are nearly free, and none behind them pays: K is then well below
# what is drafted, so a planner that fixes it has to rank.
TIGHT_COST = StepCost(
    tokens=Curve((1, RUNNING, RUNNING + RUNNING // 2, 2000), (0.1, 0.1, 0.11, 2.0)),
    draft=Curve((1, 1000), (1e-4, 2e-3)),
)
CONFIDENCES = (0.9, 0.3)  # of the token behind an even one, behind an odd one


@dataclass(frozen=True, slots=True)
class Run:
    """One run: everything that decides what is drawn."""

    planner: Planner
    sampling: SamplingParams
    requests: range  # each number is its request's nonce
    cost: StepCost = COST
    prompt: tuple[int, ...] = PROMPT
    lookup: bool = False  # what repeats itself is drafted by the engine
    model: bool = True  # there is a drafter
    biased: bool = False  # a defect is planted: see BiasedHead
    kind: str = "leaky"  # of the drafter: the one of `make_models`, or of `make_method_models`


@dataclass(frozen=True, slots=True)
class Draws:
    """The first LOOKED_AT tokens of every answer [N, 3], and how they came about."""

    tokens: NDArray[np.int64]
    proposed: int
    admitted: int
    accepted: int
    sources: dict[DraftSource, int]  # tokens accepted from each
    fallbacks: tuple[str, ...]

    def counts(self) -> NDArray[np.int64]:
        """How often each continuation was drawn, [V, V, V]."""
        counts = np.zeros((VOCAB,) * LOOKED_AT, np.int64)
        np.add.at(counts, tuple(self.tokens.T), 1)
        return counts


def make_models(folder: Path) -> Settings:
    """A tiny target, and a drafter for it whose confidence in a token gives away the one before it,
    so that a planner which looked ahead would bias the output."""
    target = tiny_target(folder / "target", vocab_size=VOCAB)
    drafter = tiny_drafter(folder / "drafter", target, block_size=2)
    model = load_drafter(drafter, target)
    behind_even, behind_odd = torch.tensor(CONFIDENCES).logit()
    with torch.no_grad():
        model.confidence_head.proj.bias.zero_()
        weights = model.confidence_head.proj.weight[0].zero_()
        before = weights[-VOCAB:]  # the Markov embedding is one-hot
        before[0::2], before[1::2] = behind_even, behind_odd
    save_drafter(model, drafter)
    return _settings(target, drafter)


def make_method_models(folder: Path, kind: str) -> Settings:
    """A tiny target and a random drafter of some kind: right by chance, and wrong as often."""
    target = tiny_target(folder / "target", vocab_size=VOCAB)
    fields = {"block_size": 1 if kind == "mtp1" else 2, "selector_top_k": 4} | METHODS[kind]
    save_drafter(model_on(target, **fields), folder / "drafter")
    return _settings(target, folder / "drafter")


def _settings(target: Path, drafter: Path) -> Settings:
    flags = {"target": target, "drafter": drafter, "precision": "fp32", "threads": 1}
    cache = {"kv-tokens": 8 * RUNNING, "kv-block-size": 8}
    return load_settings([f"--{key}={value}" for key, value in (flags | cache).items()], {})


def exact_law(settings: Settings, run: Run) -> NDArray[np.float64]:
    """The target's own law of the first LOOKED_AT tokens, [V, V, V], by enumeration: transformers'
    logits behind every continuation, transformed in fp64."""
    sampling = run.sampling
    model = AutoModelForCausalLM.from_pretrained(settings.target)
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    texts = torch.cat((torch.tensor(run.prompt).expand(len(pairs), -1), pairs), dim=1)
    with torch.inference_mode():
        logits = model(texts).logits[:, -LOOKED_AT:].numpy()
    p = transform(logits, sampling.temperature, sampling.top_k, sampling.top_p)
    first, second, third = p.reshape(VOCAB, VOCAB, LOOKED_AT, VOCAB).transpose(2, 0, 1, 3)
    return first[0, 0][:, None, None] * second[:, 0, :, None] * third


def draw(settings: Settings, run: Run) -> Draws:
    """Do the run, with drafter and verifier behind gRPC. For a process of its own."""
    torch.set_num_threads(1)
    return asyncio.run(_draw(settings, run))


async def _draw(settings: Settings, run: Run) -> Draws:
    with patch("dspark_services.models.LocalHead", BiasedHead if run.biased else LocalHead):
        target = load_target_worker(settings)
    gc.disable()  # a hundred thousand live objects are searched for garbage in vain
    async with (
        verifier_port("grpc", target, reply_timeout=60.0) as verifier,
        drafter_port("grpc", load_draft_worker(settings), reply_timeout=60.0) as drafter,
        running_driver(
            verifier,
            drafter if run.model else None,
            planner=run.planner,
            cost=run.cost,
            limits=LIMITS,
            max_waiting=len(run.requests) + 1,
            lookup=run.lookup,
        ) as (driver, recorder),
    ):
        if run.model:
            await until(lambda: driver.status.drafter_ready)
        streams = [
            driver.submit(request(run.prompt, MAX_TOKENS, replace(run.sampling, nonce=number)))
            for number in run.requests
        ]
        answers = [await collect(stream) for stream in streams]
    return _summarise(answers, recorder)


def _summarise(answers: list[list[int]], recorder: Recorder) -> Draws:
    return Draws(
        tokens=np.array(answers)[:, :LOOKED_AT],
        proposed=recorder.proposed,
        admitted=sum(outcome.stats.admitted for outcome, _ in recorder.steps),
        accepted=recorder.accepted,
        sources=dict(
            sum((Counter(o.stats.accepted_by_source) for o, _ in recorder.steps), Counter())
        ),
        fallbacks=tuple(recorder.fallbacks),
    )


class BiasedHead(LocalHead):
    """Takes BIAS from the likeliest token of every row and gives it to the second."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        p = torch.softmax(super().logits(hidden), dim=-1)
        first, second = p.topk(2, dim=-1).indices.T
        rows = torch.arange(len(p))
        p[rows, first] -= BIAS
        p[rows, second] += BIAS
        return p.log()
