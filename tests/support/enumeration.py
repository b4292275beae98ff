"""The exact law of the rejection rule, by enumeration instead of by drawing.

The rule is a step function of each uniform it reads. With distributions in multiples of 1 / D, all
its steps lie on multiples of 1 / M for a common multiple M of the denominators, so that the M cell
midpoints integrate it without error, and the answer is a fraction.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from math import lcm

import numpy as np

from dspark.core.acceptance import rejection
from dspark.core.rng import Purpose

Weights = tuple[int, ...]  # a distribution, times D
Context = tuple[int, ...]  # tokens behind the anchor
Model = Callable[[Context], Weights]
Law = dict[tuple[int, ...], Fraction]

ALMOST_ONE = 1 - 2.0**-53


def rule_law(draft: Context, target: Model, drafter: Model) -> dict[tuple[int, int], Fraction]:
    """Law of (accepted, next token) for one given draft."""
    p = [target(draft[:k]) for k in range(len(draft) + 1)]
    q = [drafter(draft[:k]) for k in range(len(draft))]
    cells = _common_cells(p, q)

    def run(length: int, uniforms: dict[tuple[Purpose, int], float]) -> tuple[int, int]:
        def uniform(purpose: Purpose, index: int) -> float:
            return uniforms.get((purpose, index), 0.0)  # 0: accepts whatever can be accepted

        return rejection(
            draft[:length],
            np.array(p[: length + 1]) / sum(p[0]),
            np.array([row[x] / sum(row) for row, x in zip(q, draft, strict=True)]),
            lambda k: np.array(q[k]) / sum(q[k]),
            uniform,
        )

    law: dict[tuple[int, int], Fraction] = {}
    reach = Fraction(1)
    for k in range(len(draft)):
        kept = sum(run(k + 1, {(Purpose.ACCEPT, k): u})[0] > k for u in cells)
        share = Fraction(kept, len(cells))
        if share < 1:
            for u in cells:
                verdict = run(k + 1, {(Purpose.ACCEPT, k): ALMOST_ONE, (Purpose.RESIDUAL, k): u})
                assert verdict[0] == k
                law[verdict] = law.get(verdict, Fraction(0)) + reach * (1 - share) / len(cells)
        reach *= share
        if reach == 0:
            return law
    for u in cells:
        verdict = run(len(draft), {(Purpose.BONUS, len(draft)): u})
        law[verdict] = law.get(verdict, Fraction(0)) + reach / len(cells)
    return law


def output_law(
    tokens: int,
    target: Model,
    drafter: Model,
    plan: Callable[[Context], int],
    block_size: int,
    judge: Model | None = None,
) -> Law:
    """Law of the first `tokens` output tokens when each step drafts `block_size` tokens, verifies
    `plan(draft)` of them and goes on behind what it committed. `judge` is the distribution the rule
    is given for the target's (default: the truth)."""
    judge = judge or target
    law: Law = {(): Fraction(1)}
    while any(len(text) < tokens for text in law):
        grown: Law = {}
        for text, mass in law.items():
            if len(text) >= tokens:
                _add(grown, text, mass)
                continue
            for draft, chance in _drafts(text, drafter, block_size):
                verified = draft[: plan(draft)]
                verdicts = rule_law(
                    verified, lambda c, t=text: judge(t + c), lambda c, t=text: drafter(t + c)
                )
                for (accepted, following), share in verdicts.items():
                    committed = (*text, *verified[:accepted], following)
                    _add(grown, committed[:tokens], mass * chance * share)
        law = grown
    return law


def model_law(tokens: int, model: Model) -> Law:
    """Law of the first `tokens` tokens drawn from `model` itself."""
    return {text: mass for text, mass in _drafts((), model, tokens) if mass}


def _drafts(text: Context, model: Model, length: int) -> list[tuple[Context, Fraction]]:
    vocabulary = range(len(model(text)))
    drafts = []
    for draft in product(vocabulary, repeat=length):
        chance = Fraction(1)
        for k, token in enumerate(draft):
            weights = model(text + draft[:k])
            chance *= Fraction(weights[token], sum(weights))
        if chance:
            drafts.append((draft, chance))
    return drafts


def _common_cells(p: list[Weights], q: list[Weights]) -> list[float]:
    """Midpoints of cells so fine that no step of the rule falls inside one."""
    sizes = {sum(row) for row in p}
    for target, drafter in zip(p, q, strict=False):
        sizes |= {weight for weight in drafter if weight}
        sizes |= {sum(max(a - b, 0) for a, b in zip(target, drafter, strict=True)) or 1}
    count = lcm(*sizes)
    return [(i + 0.5) / count for i in range(count)]


def _add(law: Law, text: tuple[int, ...], mass: Fraction) -> None:
    law[text] = law.get(text, Fraction(0)) + mass
