"""A simulation: one workload and load, one planner, one or more independent cells."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dspark.core.errors import ConfigError
from dspark.core.planner import parse_planner
from dspark.engine.admission import Limits
from dspark.sim.cell import Cell, StepRecord
from dspark.sim.load import Load
from dspark.sim.presets import load_cost
from dspark.sim.report import Summary
from dspark.sim.workload import Workload

Log = Callable[[str, int, StepRecord], None]  # planner, cell, step


@dataclass(frozen=True, slots=True)
class Scenario:
    """What does not depend on the planner. `limits` are those of one cell."""

    workload: Workload
    load: Load
    cost: str  # as `load_cost` takes it
    limits: Limits
    requests: int
    cells: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.cells <= self.requests:
            raise ConfigError(
                f"{self.requests} requests cannot be dealt to {self.cells} cells: "
                f"each cell needs at least one."
            )


def simulate(scenario: Scenario, planner: str, log: Log | None = None) -> Summary:
    """Run every request of a scenario to its end. The same scenario gives the same steps.

    Raises:
        ConfigError: the planner or the cost is unknown.
    """
    draft_length = parse_planner(planner).draft_length(scenario.workload.block_size)
    cost = load_cost(scenario.cost, draft_length)
    results = []
    for number in range(scenario.cells):
        cell = Cell(
            scenario.workload,
            cost,
            parse_planner(planner),
            scenario.limits,
            scenario.seed,
            observe=partial(log, planner, number) if log is not None else None,
        )
        arrivals = scenario.load.arrivals(scenario.requests, number, scenario.cells, scenario.seed)
        results.append(cell.run(arrivals))
    return Summary.of(planner, results)
