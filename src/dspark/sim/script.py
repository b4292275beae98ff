"""One request's whole future, drawn before it runs: nothing a planner does can change its luck, so
planners are compared on the same requests and the same drafts."""

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from dspark.core.types import Floats, Ints
from dspark.sim.workload import Domain, Workload

RIGHT = 1
"""The only token that the virtual target ever says."""
WRONG = 0
VOCAB_SIZE = 2


@dataclass(frozen=True)
class Blocks:
    """The block that would be drafted at each output position, [output length, block size]."""

    tokens: Ints  # RIGHT or WRONG
    confidence_logits: Floats


@dataclass(frozen=True)
class Script:
    """Lengths in tokens; `seed` names the request's own random stream."""

    domain: Domain
    prompt_len: int
    output_len: int
    seed: tuple[int, int]

    @cached_property
    def blocks(self) -> Blocks:
        """Drawn when the drafter first asks; a request that is never drafted does without."""
        return draw_blocks(self.domain, self.output_len, np.random.default_rng((*self.seed, 1)))


def draw_script(workload: Workload, seed: int, index: int) -> Script:
    """Request `index` of a workload: a function of these three alone."""
    rng = np.random.default_rng((seed, index, 0))
    shares = np.cumsum([domain.share for domain in workload.domains])
    domain = workload.domains[int(np.searchsorted(shares, rng.random() * shares[-1], "right"))]
    return Script(domain, domain.prompt.draw(rng), domain.output.draw(rng), (seed, index))


def draw_blocks(domain: Domain, positions: int, rng: np.random.Generator) -> Blocks:
    """Binormal confidences: a signal s ~ N(+-d/2, 1), + for a right token, moves the logit of the
    prior by d*s, the log-likelihood ratio; d = sqrt(2) * inverse normal CDF of the AUC."""
    acceptance = np.array(domain.acceptance)
    distance = 2**0.5 * NormalDist().inv_cdf(domain.auc)
    right = rng.random((positions, len(acceptance))) < acceptance
    signal = rng.standard_normal(right.shape) + np.where(right, distance / 2, -distance / 2)
    logits = np.log(acceptance / (1 - acceptance)) + distance * signal
    return Blocks(
        tokens=np.where(right, RIGHT, WRONG),
        confidence_logits=(domain.logit_scale * logits + domain.logit_bias).astype(np.float32),
    )
