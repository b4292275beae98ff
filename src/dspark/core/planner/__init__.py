"""Planners: how many draft tokens of each request the target verifies in a step.

A planner runs after the drafts are in. To keep the output law exact it may admit token k of a
request without looking at that token or at anything behind it, so with current scores it only ranks
candidates and judges each by those before it. Decisions of another kind (whether to draft at all,
how many tokens a step may verify) are taken from history, before anything is drafted. Which scores
may decide what is part of their types: `dspark.core.survival`.
"""

from dspark.core.planner.baselines import FixedPlanner, NonePlanner, ThresholdPlanner
from dspark.core.planner.capacity import CapacityPlanner
from dspark.core.planner.causal import CausalPlanner
from dspark.core.planner.interface import Lengths, Outlook, Planner, StepLoad
from dspark.core.planner.parse import parse_planner
from dspark.core.planner.prospects import plain_throughput

__all__ = [
    "CapacityPlanner",
    "CausalPlanner",
    "FixedPlanner",
    "Lengths",
    "NonePlanner",
    "Outlook",
    "Planner",
    "StepLoad",
    "ThresholdPlanner",
    "parse_planner",
    "plain_throughput",
]
