import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from dspark.core.errors import ConfigError, DrafterError
from dspark.core.online_calibration import BATCH_STEPS, MIN_BLOCKS
from dspark.core.types import Scaling, SequenceKey, VerificationMode
from dspark.engine.calibrator import Calibrator
from tests.support.world import World, block, drafter_info, request

GREEDY, REJECTION = VerificationMode.GREEDY, VerificationMode.REJECTION
KEY = SequenceKey(1, 1)


def boasted(calibrator: Calibrator, mode: VerificationMode, blocks: int = 2 * MIN_BLOCKS) -> None:
    """Blocks of a drafter that says 95 % and is right about half the time."""
    draft = block(KEY, [1, 2], [3.0, 3.0], mode=mode)
    rows = blocks // (2 * BATCH_STEPS)
    for _ in range(2 * BATCH_STEPS):
        survival = np.cumprod(calibrator.confidences([draft] * rows, [mode] * rows), axis=1)
        accepted = np.arange(rows) % 3
        calibrator.record([draft] * rows, [mode] * rows, survival, accepted, np.full(rows, 2))


def test_confidences_are_scaled_by_their_mode() -> None:
    scaling = Scaling((2.0, 1.0, 0.5), (0.0, 1.0, 0.0))
    info = replace(drafter_info(3), calibration={"greedy": scaling})
    drafts = [block(KEY, [1, 2], [1.0, -1.0]), None, block(KEY, [1, 2, 3], [1.0, -1.0, 0.0])]
    found = Calibrator(info).confidences(drafts, [GREEDY, GREEDY, REJECTION])
    scaled = np.array([[0.5, 0.0, -np.inf], [-np.inf] * 3, [1.0, -1.0, 0.0]])
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-scaled)))


@pytest.mark.parametrize(
    "scaling",
    [
        Scaling.none(2),
        Scaling((1.0, 1.0, 0.0), (0.0,) * 3),
        Scaling((1.0,) * 3, (0.0, 0.0, float("nan"))),
    ],
)
def test_a_scaling_that_does_not_fit_is_refused(scaling: Scaling) -> None:
    with pytest.raises(DrafterError, match="calibrate"):
        Calibrator(replace(drafter_info(3), calibration={"greedy": scaling}))


def test_a_mode_learns_from_its_own_verdicts() -> None:
    calibrator = Calibrator(drafter_info(2))
    boasted(calibrator, GREEDY)
    draft = block(KEY, [1, 2], [3.0, 3.0])
    greedy, rejection = calibrator.confidences([draft, draft], [GREEDY, REJECTION])
    assert greedy[0] < 0.75
    assert rejection[0] > 0.95
    status = calibrator.status()
    assert set(status) == {GREEDY}
    assert status[GREEDY].online
    assert len(status[GREEDY].positions) == 2
    assert status[GREEDY].positions[0].count == 2 * MIN_BLOCKS
    assert json.loads(json.dumps(asdict(status[GREEDY])))["online"] is True  # as `/status` says it


def test_what_was_learnt_can_be_kept() -> None:
    known = Calibrator(drafter_info(2))
    boasted(known, REJECTION)
    again = Calibrator(drafter_info(2))
    again.restore(known.to_json())
    draft = block(KEY, [1, 2], [3.0, -1.0])
    for mode in VerificationMode:
        np.testing.assert_array_equal(
            again.confidences([draft], [mode]), known.confidences([draft], [mode])
        )


def test_what_is_not_a_state_is_refused() -> None:
    state = json.loads(Calibrator(drafter_info(2)).to_json())
    other = json.loads(Calibrator(drafter_info(3)).to_json())
    broken = json.loads(json.dumps(state))
    broken["greedy"]["beliefs"][0]["information"] = [[1.0, 2.0], [2.0, 1.0]]
    for bad in ("not json", "[]", "{}", json.dumps(other), json.dumps(broken)):
        with pytest.raises(ConfigError, match="calibration state"):
            Calibrator(drafter_info(2)).restore(bad)


def test_the_engine_learns_while_it_serves() -> None:
    world = World(accuracy=0.5)
    for seed in range(40):
        world.engine.add(request([seed % 5, 1], max_tokens=40))
    world.run(20_000)
    (mode,) = world.engine.calibration
    status = world.engine.calibration[mode]
    assert status.positions[0].count > MIN_BLOCKS
    assert status.online
