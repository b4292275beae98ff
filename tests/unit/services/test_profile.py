"""How the start-up profile spends its time; the surface it gives is tested where it is fitted."""

from dataclasses import dataclass, field

import pytest
from dspark_services.scheduler.profile import time_steps

from dspark.core.cost import StepCost
from dspark.core.statistics import lower_quartile
from dspark.core.types import ProfileShape, TargetInfo
from dspark.engine.admission import Limits

TARGET = TargetInfo(1, "tiny", "", "", "", 64, 8192, 1024, 16, "fp32", "cpu")
LIMITS = Limits(max_running=64, max_prefill_tokens=256, max_batch_tokens=512)


@dataclass
class Machine:
    """Answers for a verifier whose steps take what they should, times `slowness`."""

    slowness: float = 1.0
    calls: list[tuple[list[ProfileShape], int]] = field(default_factory=list)

    def seconds(self, shape: ProfileShape) -> float:
        context = shape.requests * shape.context
        own = 20e-3 + 3e-4 * shape.batch_tokens + 1e-4 * shape.head_rows + 3e-6 * context
        return self.slowness * own

    async def profile(self, shapes: list[ProfileShape], repeats: int) -> list[float]:
        self.calls.append((shapes, repeats))
        return [self.seconds(shape) for shape in shapes]


async def test_small_steps_take_turns_as_often_as_the_machine_allows() -> None:
    turns = []
    for slowness in (0.1, 1.0, 100.0):
        machine = Machine(slowness)
        await time_steps(machine, TARGET, LIMITS)  # type: ignore[arg-type]  # all that it asks
        (first, once), (second, repeats), *larger = machine.calls
        assert first == second
        assert once == 1
        assert {shape.batch_tokens for shape in first} == {1, 2, 4, 8, 16, 32, 64}
        assert [shape.batch_tokens for [shape], _ in larger] in ([128, 256, 512], [])
        turns.append(repeats)
    assert turns == [8, 6, 1]


async def test_the_surface_is_the_machines() -> None:
    machine = Machine()
    cost = StepCost.from_profile(await time_steps(machine, TARGET, LIMITS))  # type: ignore[arg-type]
    assert cost.head_row_seconds == pytest.approx(1e-4)
    assert cost.context_token_seconds == pytest.approx(3e-6)
    for tokens in (1, 16, 100, 512):
        expected = machine.seconds(ProfileShape(tokens, tokens, 1, 500))
        assert float(cost.verify_seconds(tokens, tokens, 500)) == pytest.approx(expected)


def test_what_held_a_step_up_is_not_its_time() -> None:
    assert lower_quartile([9.0, 1.1, 8.0, 1.0]) == 1.0
    assert lower_quartile([1.3, 7.0, 1.2, 1.0, 1.1]) == 1.1
