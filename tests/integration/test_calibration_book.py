"""What was learnt about a drafter's confidences outlives the scheduler, and belongs to it alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dspark_services.scheduler.calibrations import CalibrationBook

from dspark.core.types import Scaling, SequenceKey, VerificationMode
from dspark.engine.calibrator import Calibrator
from dspark.ops.state import FileStore
from tests.support.world import block, drafter_info

GREEDY = VerificationMode.GREEDY
INFO = drafter_info(2, incarnation=1)
DRAFT = block(SequenceKey(1, 1), [1, 2], [3.0, 3.0])


def first_confidence(calibrator: Calibrator) -> float:
    return float(calibrator.confidences([DRAFT], [GREEDY])[0, 0])


async def learnt(store: FileStore) -> CalibrationBook:
    book = CalibrationBook(store)
    calibrator = await book.of(INFO)
    for _ in range(32):
        survival = np.cumprod(calibrator.confidences([DRAFT] * 32, [GREEDY] * 32), axis=1)
        accepted = np.arange(32) % 3
        calibrator.record([DRAFT] * 32, [GREEDY] * 32, survival, accepted, np.full(32, 2))
    await book.save()
    return book


def spoil(folder: Path) -> None:
    (path,) = folder.iterdir()
    path.write_text("{")


async def test_a_new_scheduler_starts_warm(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    book = await learnt(store)
    known = first_confidence(await book.of(INFO))
    assert known < 0.75 < first_confidence(Calibrator(INFO))
    again = await CalibrationBook(store).of(replace(INFO, incarnation=2))
    assert first_confidence(again) == known


async def test_a_drafter_that_restarts_keeps_its_calibrator(tmp_path: Path) -> None:
    book = await learnt(FileStore(tmp_path))
    assert await book.of(replace(INFO, incarnation=2)) is await book.of(INFO)


@pytest.mark.parametrize(
    "change",
    [
        {"fusion_digest": "another"},
        {"target_digest": "another"},
        {"block_size": 3},
        {"calibration": {"greedy": Scaling((2.0, 2.0), (0.0, 0.0))}},
    ],
)
async def test_another_drafter_learns_afresh(tmp_path: Path, change: dict[str, object]) -> None:
    store = FileStore(tmp_path)
    await learnt(store)
    other = replace(INFO, **change)
    calibrator = await CalibrationBook(store).of(other)
    assert first_confidence(calibrator) == first_confidence(Calibrator(other))


async def test_a_spoilt_file_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path)
    await learnt(store)
    spoil(tmp_path)
    calibrator = await CalibrationBook(store).of(INFO)
    assert first_confidence(calibrator) == first_confidence(Calibrator(INFO))
    assert caplog.text.count("learnt afresh") == 1
