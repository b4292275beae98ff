"""Small workloads and costs for simulations."""

from dspark.core.cost import Curve, StepCost
from dspark.sim.workload import Domain, Lengths, Workload

EASY = (0.95, 0.9, 0.85, 0.8)
HARD = (0.4, 0.35, 0.3, 0.25)


def domain(name: str = "math", acceptance: tuple[float, ...] = EASY, **fields: object) -> Domain:
    """Ten tokens in and twenty out, unless said otherwise; confidences that know something."""
    lengths = {"prompt": Lengths(10, 10), "output": Lengths(20, 20)}
    return Domain(**{"name": name, "acceptance": acceptance, "auc": 0.8, **lengths, **fields})


def workload(*domains: Domain, temperature: float = 0.0) -> Workload:
    return Workload("small", "a test", domains or (domain(),), temperature)


def step_cost(per_token: float = 0.01, per_draft: float = 0.01) -> StepCost:
    """About a second a step, and so much more for each row and each request that drafts."""
    return StepCost(
        tokens=Curve((0, 100), (1.0, 1.0 + 100 * per_token)),
        draft=Curve((0, 100), (0.0, 100 * per_draft)),
        head_row_seconds=0.002,
        context_token_seconds=1e-4,
        overhead_seconds=0.05,
    )
