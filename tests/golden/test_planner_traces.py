"""Plans for some steps of a realistic server. A change here changes behaviour: review it."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import CausalPlanner, FixedPlanner, NonePlanner, StepLoad
from dspark.core.survival import CurrentScores

GOLDEN = json.loads((Path(__file__).parent / "planner_traces.json").read_text())
PLANNERS = {planner.name: planner for planner in (NonePlanner(), FixedPlanner(3), CausalPlanner())}

COST = StepCost(  # two CPU cores, a 135 M target, a two-layer drafter
    tokens=Curve((1, 8, 16, 32, 64, 128), (0.035, 0.048, 0.055, 0.065, 0.101, 0.148)),
    draft=Curve((1, 8, 32), (0.005, 0.010, 0.027)),
    head_row_seconds=2e-4,
    context_token_seconds=1e-6,
    overhead_seconds=0.002,
)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("step", GOLDEN, ids=lambda step: step["name"])
def test_plan(step: dict, planner: str) -> None:
    confidences = step["confidences"]
    load = StepLoad(
        requests=len(confidences),
        base_tokens=len(confidences) + step["prefill_tokens"],
        context_tokens=256 * len(confidences),
        caps=np.array(step["caps"], np.int64),
        max_batch_tokens=step["max_batch_tokens"],
    )
    scores = CurrentScores.from_confidences(confidences, block_size=7)
    assert PLANNERS[planner].plan(scores, load, COST).tolist() == step["plans"][planner]
