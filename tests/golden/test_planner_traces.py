"""Plans for some steps of a realistic server. A change here changes behaviour: review it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import StepLoad, parse_planner
from dspark.core.survival import CurrentScores, DeterminedScores, HistoricalScores

GOLDEN = json.loads((Path(__file__).parent / "planner_traces.json").read_text())
PLANNERS = ("none", "fixed:3", "threshold:0.6", "causal", "capacity")

COST = StepCost(  # two CPU cores, a 135 M target, a two-layer drafter
    tokens=Curve((1, 8, 16, 32, 64, 128), (0.035, 0.048, 0.055, 0.065, 0.101, 0.148)),
    draft=Curve((1, 8, 32), (0.005, 0.010, 0.027)),
    head_row_seconds=2e-4,
    context_token_seconds=1e-6,
    overhead_seconds=0.002,
)


HISTORY = HistoricalScores.from_confidences(  # what earlier blocks looked like, every second poor
    [[0.9, 0.9, 0.8, 0.8, 0.8, 0.7, 0.7], [0.7, 0.5, 0.5, 0.4, 0.4, 0.4, 0.4]] * 8, block_size=7
)


def load_of(step: dict) -> StepLoad:
    confidences = step["confidences"]
    base_tokens = len(confidences) + step["prefill_tokens"]
    return StepLoad(
        base_tokens=base_tokens,
        context_tokens=256 * len(confidences),
        caps=np.array(step["caps"], np.int64),
        weights=np.ones(len(confidences)),
        capacity=max(step["max_batch_tokens"] - base_tokens, 0),
    )


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("step", GOLDEN, ids=lambda step: step["name"])
def test_plan(step: dict, name: str) -> None:
    planner, load = parse_planner(name), load_of(step)
    scores = CurrentScores.from_confidences(step["confidences"], block_size=7)
    capacity = planner.outlook(HISTORY, load, COST).capacity
    plan = planner.plan(scores, replace(load, capacity=capacity), COST)
    assert plan.tolist() == step["plans"][name]


@pytest.mark.parametrize("step", GOLDEN, ids=lambda step: step["name"])
def test_plan_of_a_determined_step(step: dict) -> None:
    scores = DeterminedScores.from_confidences(step["confidences"], block_size=7)
    plan = parse_planner("capacity").plan(scores, load_of(step), COST)
    assert plan.tolist() == step["plans"]["capacity, determined"]
