"""Online calibration of confidences, from the verdicts of the target.

Every position k has a scale a_k > 0 and an intercept b_k on top of the drafter's own scaling:
c_k = sigmoid(a_k * own_k + b_k), which keeps the ranking within a position.

What is known of (log a, b) is a normal distribution, updated by batches of verified blocks: the
maximum of likelihood times prior by Fisher scoring (Laplace's approximation), with the older
evidence discounted (West & Harrison, *Bayesian Forecasting and Dynamic Models*, 1997, ch. 6). So
memory and work do not grow, and a drafter that meets other prompts is followed.

As in offline scaling, position k is fitted to the survival: labels are "accepted at least k" on the
blocks that admitted at least k tokens, their probability is the survival before k times c_k.
Few blocks get deep, so the positions share a scale and an intercept, from all the tokens whose
prefix was accepted, and depart from these as far as their own labels ask for it.
"""

from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.core.calibration import Array, scaled, sigmoid
from dspark.core.errors import ConfigError
from dspark.core.types import Scaling

Ints = NDArray[np.int64]

MEMORY = 1400
"""Verified blocks after which evidence counts 1/e."""

GUARD_MEMORY = 512
"""The same for the comparison with the drafter's own confidences."""

MIN_BLOCKS = 256
"""Verified blocks before the fit is used."""

BATCH_BLOCKS, BATCH_STEPS = 64, 8
"""A batch is complete with so many blocks of so many calls: few large ones are cheap."""

_SHARED_PRECISION = 5.0  # of the prior around "as the drafter says"; a token brings about 0.1
_POSITION_PRECISION = 200.0  # of the prior around "as the other positions"
_ITERATIONS = 2  # a batch moves the maximum little
_LARGEST_LOG_SCALE = float(np.log(8.0))  # the range of the offline grid
_LARGEST_LOGIT = 30.0  # a drafter may be certain, arithmetic may not


class OnlineCalibration:
    """The calibration of one drafter in one verification mode."""

    def __init__(self, own: Scaling) -> None:
        """The drafter's own scaling: where it starts, and what it must not fall behind."""
        self._own = own
        self._shared = Belief(_SHARED_PRECISION)
        self._positions = [Belief(_POSITION_PRECISION) for _ in own.temperatures]
        self._blocks = 0
        self._lead = 0.0  # of the fit over the drafter: squared error it saved on unseen blocks
        self._batch: list[tuple[Array, Ints, Ints]] = []

    @property
    def has_learnt(self) -> bool:
        """Whether there is anything to keep."""
        return self._blocks > 0

    @property
    def in_use(self) -> bool:
        """Whether the fit replaces the drafter's own scaling: enough blocks were seen, and it has
        been the better of the two lately."""
        return bool(self._blocks >= MIN_BLOCKS and self._lead > 0.0)

    def confidences(self, logits: ArrayLike) -> Array:
        """Calibrated confidences [..., K] of as many logits; -inf, for no token, gives 0."""
        own = scaled(logits, self._own)
        return self._fitted(own) if self.in_use else sigmoid(own)

    def record(self, logits: ArrayLike, accepted: ArrayLike, admitted: ArrayLike) -> None:
        """Learn from N blocks: confidence logits [N, K], tokens accepted [N] and admitted [N]."""
        accepted, admitted = np.asarray(accepted), np.asarray(admitted)
        seen = admitted > 0
        own = scaled(np.asarray(logits)[seen], self._own)
        own = np.clip(own, -_LARGEST_LOGIT, _LARGEST_LOGIT)
        self._batch.append((own, accepted[seen], admitted[seen]))
        blocks = sum(len(part) for part, _, _ in self._batch)
        if blocks >= BATCH_BLOCKS and len(self._batch) >= BATCH_STEPS:
            own, accepted, admitted = map(np.concatenate, zip(*self._batch, strict=True))
            self._batch.clear()
            self._compare(own, accepted, admitted)  # first: these blocks are unseen as yet
            self._learn(own, accepted, admitted)
            self._blocks += blocks

    def _fitted(self, own: Array) -> Array:
        shared = self._shared.mean
        deviation = np.array([belief.mean for belief in self._positions])
        return sigmoid(_moved(_moved(own, shared), deviation.T))

    def _compare(self, own: Array, accepted: Ints, admitted: Ints) -> None:
        positions = np.arange(own.shape[1])
        label = accepted[:, None] > positions
        seen = admitted[:, None] > positions
        drafter, fit = (
            float((((np.cumprod(confidences, axis=1) - label) ** 2)[seen]).sum())
            for confidences in (sigmoid(own), self._fitted(own))
        )
        self._lead = self._lead * np.exp(-len(own) / GUARD_MEMORY) + drafter - fit

    def _learn(self, own: Array, accepted: Ints, admitted: Ints) -> None:
        for belief in (self._shared, *self._positions):
            belief.discount(float(np.exp(-len(own) / MEMORY)))
        positions = np.arange(own.shape[1])
        reached = (admitted[:, None] > positions) & (accepted[:, None] >= positions)
        self._shared.update(own[reached], (accepted[:, None] > positions)[reached], np.ones(1))
        shared = _moved(own, self._shared.mean)
        survival = np.ones(len(own))
        for j, belief in enumerate(self._positions):
            seen = admitted > j
            belief.update(shared[seen, j], accepted[seen] > j, survival[seen])
            survival *= sigmoid(_moved(shared[:, j], belief.mean))

    def state(self) -> dict[str, Any]:
        """What was learnt, as JSON has it; `restore` takes it back."""
        return {
            "blocks": self._blocks,
            "lead": self._lead,
            "beliefs": [belief.state() for belief in (self._shared, *self._positions)],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a drafter with the same scaling. Raises ConfigError, and
        stays as it was, if this is no such state."""
        try:
            shared, *positions = map(Belief.of_state, state["beliefs"])
            blocks, lead = int(state["blocks"]), float(state["lead"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"A calibration state is malformed: {error!r}.") from error
        if len(positions) != len(self._positions) or blocks < 0 or not np.isfinite(lead):
            raise ConfigError(f"A calibration state is not for {len(self._positions)} positions.")
        self._shared, self._positions, self._blocks, self._lead = shared, positions, blocks, lead


class Belief:
    """A normal distribution of (log scale, intercept), around (0, 0) before any evidence."""

    def __init__(self, precision: float) -> None:
        self._prior = precision
        self.mean: Array = np.zeros(2)
        self.information: Array = precision * np.eye(2)

    def discount(self, kept: float) -> None:
        """Let the evidence count a share `kept` of what it did; the prior stays as strong."""
        information = kept * self.information + (1.0 - kept) * self._prior * np.eye(2)
        evidence = kept * self.information @ self.mean
        self.mean = np.asarray(np.linalg.solve(information, evidence), np.float64)
        self.information = information

    def update(self, logits: Array, labels: NDArray[np.bool_], survival: Array) -> None:
        """Learn from labels [n] of probability survival * sigmoid(scale * logit + intercept)."""
        before, mean, evidence = self.mean, self.mean, np.zeros((2, 2))
        for _ in range(_ITERATIONS):
            kept = sigmoid(_moved(logits, mean))
            p = np.clip(survival * kept, 1e-6, 1.0 - 1e-6)
            slope = survival * kept * (1.0 - kept)  # dp/dz
            weight = slope / (p * (1.0 - p))
            design = np.stack([np.exp(mean[0]) * logits, np.ones_like(logits)])  # dz/d(mean)
            evidence = (design * (weight * slope)) @ design.T
            gradient = design @ (weight * (labels - p)) - self.information @ (mean - before)
            step = np.linalg.solve(self.information + evidence, gradient)
            mean = mean + np.clip(step, -1.0, 1.0)
            mean[0] = np.clip(mean[0], -_LARGEST_LOG_SCALE, _LARGEST_LOG_SCALE)
        self.mean, self.information = mean, self.information + evidence

    def state(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "prior": self._prior,
            "mean": self.mean.tolist(),
            "information": self.information.tolist(),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError for what is not the state of a belief."""
        belief = cls(float(state["prior"]))
        mean, information = np.array(state["mean"], float), np.array(state["information"], float)
        if mean.shape != (2,) or information.shape != (2, 2) or not np.isfinite(mean).all():
            raise ValueError("a belief has two finite means")
        if not np.isfinite(information).all() or np.linalg.eigvalsh(information)[0] <= 0.0:
            raise ValueError("an information matrix is positive definite")
        belief.mean, belief.information = mean, information
        return belief


def _moved(logits: Array, mean: Array) -> Array:
    """scale * logit + intercept, of (log scale, intercept)."""
    return np.asarray(np.exp(mean[0]) * logits + mean[1])
