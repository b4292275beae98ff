"""What the planners are for, seen in the simulator: gain under light load, no loss under heavy
load, and the unlikely drafts trimmed first."""

from dataclasses import replace

import pytest

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import parse_planner
from dspark.engine.admission import Limits
from dspark.sim.cell import Cell, StepRecord
from dspark.sim.load import Arrivals, ClosedLoop
from dspark.sim.report import Summary
from dspark.sim.script import draw_script
from dspark.sim.workload import Lengths
from tests.support.workloads import HARD, domain, workload

LONG = Lengths(40, 40)
WORKLOAD = workload(domain("math", output=LONG), domain("chat", HARD, output=LONG))
COST = StepCost(  # eight rows cost hardly more than one, then every row costs
    tokens=Curve((1, 8, 108), (1.0, 1.05, 11.05)), draft=Curve((1, 32), (0.05, 0.4))
)


def simulated(planner: str, users: int, cells: int = 1) -> Summary:
    results = []
    for number in range(cells):
        cell = Cell(WORKLOAD, COST, parse_planner(planner), Limits(users, 256, 4096), seed=5)
        arrivals = ClosedLoop(users * cells).arrivals(2 * users * cells, number, cells, 5)
        results.append(cell.run(arrivals))
    return Summary.of(planner, results)


def throughput(planner: str, users: int, cells: int = 1) -> float:
    rate = simulated(planner, users, cells).throughput
    assert rate is not None
    return rate


@pytest.mark.parametrize("planner", ["causal", "capacity"])
def test_a_lone_user_gains_and_a_crowd_does_not_lose(planner: str) -> None:
    assert throughput(planner, 2) > 1.3 * throughput("none", 2)
    plain = throughput("none", 24)
    assert throughput("fixed:4", 24) < 0.9 * plain
    assert throughput(planner, 24) > 0.97 * plain


def test_load_shortens_what_is_verified_and_chat_is_trimmed_first() -> None:
    light, heavy = simulated("causal", 2), simulated("causal", 8)
    assert light.all.verified is not None
    assert heavy.all.verified is not None
    assert light.all.verified > 1.2 * heavy.all.verified
    chat, math = (heavy.domains[name].trimmed for name in ("chat", "math"))
    assert chat is not None
    assert math is not None
    assert chat > math + 0.1


def test_cells_add_up() -> None:
    assert throughput("causal", 4, cells=2) == pytest.approx(2 * throughput("causal", 4), rel=0.1)


@pytest.mark.parametrize("planner", ["causal", "capacity"])
def test_long_contexts_change_plans_without_a_restart(planner: str) -> None:
    """Reading 4k tokens of context for every request makes one more row of each a bargain."""
    short = domain("short", HARD, prompt=Lengths(50, 50), output=LONG)
    long = domain("long", HARD, prompt=Lengths(4000, 4000), output=LONG)
    mixed = workload(short, long)
    cost = replace(COST, tokens=Curve((1, 101), (1.0, 11.0)), context_token_seconds=1e-4)
    by_domain: dict[str, list[int]] = {"short": [], "long": []}
    for index in range(80):
        by_domain[draw_script(mixed, 5, index).domain.name].append(index)
    order = [index for own in by_domain.values() for index in own[:24]]
    steps: list[StepRecord] = []
    cell = Cell(mixed, cost, parse_planner(planner), Limits(8, 1 << 15, 1 << 16), 5, steps.append)
    cell.run(Arrivals([(0.0, index) for index in order]))
    lengths = [
        sum(step.admitted for step in part) / sum(step.running for step in part)
        for part in (steps[10 : len(steps) // 2 - 10], steps[len(steps) // 2 + 10 : -10])
    ]
    assert lengths[1] > 1.5 * lengths[0]
