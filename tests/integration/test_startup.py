"""Meeting the workers: who fits, what steps cost, and what is remembered for the next start."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
from dspark_services.models import load_draft_worker, load_target_worker
from dspark_services.scheduler import costs, profile
from dspark_services.scheduler.handshake import check_drafter_fits
from dspark_services.scheduler.startup import ready_driver

from dspark.core.cost import StepCost
from dspark.core.errors import HandshakeError, WorkerUnavailableError
from dspark.ops.ports import free_ports
from dspark.ops.settings import Settings, load_settings
from tests.support.system import COST, collect, request, until
from tests.support.tiny import tiny_drafter, tiny_target
from tests.support.workers import drafter_port, drafter_server, verifier_port, verifier_server


@pytest.fixture
def settings(tiny_settings_argv: list[str], tmp_path: Path) -> Settings:
    return load_settings([*tiny_settings_argv, f"--cache={tmp_path}"], {})


async def test_the_cost_profile_is_measured_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = settings.model_copy(update={"transport": "inproc"})
    async with ready_driver(settings, None) as driver:
        assert driver.status.verifier_ready
    (path,) = (settings.cache_dir / "state").glob("*.json")
    assert re.search(r"a target step takes .* ms for 1 and .* ms for 16 tokens", caplog.text)

    async def measured_again(workers: profile.Workers) -> StepCost:
        raise AssertionError("the profile in the cache was not used")

    monkeypatch.setattr(costs, "measure", measured_again)
    for seconds, age in ((300, "5 minutes"), (3 * 3600, "3 hours"), (40 * 86400, "40 days")):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | {"measured_at": time.time() - seconds}))
        async with ready_driver(settings, None):
            pass
        assert f"cost profile of {age} ago: a target step takes" in caplog.text


async def test_a_profile_is_measured_anew_on_demand(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings.model_copy(update={"transport": "inproc"})
    async with ready_driver(settings, None):
        pass

    async def measured_again(workers: profile.Workers) -> StepCost:
        return COST

    monkeypatch.setattr(costs, "measure", measured_again)
    for reprofile, used in ((False, False), (True, True), (False, True)):  # and kept
        wanted = settings.model_copy(update={"reprofile": reprofile})
        async with ready_driver(wanted, None) as driver:
            assert (driver.cost == COST) is used


async def test_a_damaged_profile_is_measured_again(settings: Settings) -> None:
    settings = settings.model_copy(update={"transport": "inproc"})
    async with ready_driver(settings, None):
        pass
    (path,) = (settings.cache_dir / "state").glob("*.json")
    good = path.read_text()
    path.write_text(good[: len(good) // 2])
    async with ready_driver(settings, None):
        pass
    assert path.read_text().endswith("}")


async def test_measured_costs_make_sense(settings: Settings) -> None:
    async with (
        verifier_port("grpc", load_target_worker(settings)) as verifier,
        drafter_port("grpc", load_draft_worker(settings)) as drafter,
    ):
        workers = profile.Workers(
            verifier, await verifier.handshake(), drafter, await drafter.handshake()
        )
        cost = await profile.measure(workers)
        again = await profile.measure(workers)  # leaves nothing behind that disturbs another
    for measured in (cost, again):
        assert 0 < float(measured.verify_seconds(1, 1, 0)) < 1
        assert 0 < measured.draft_seconds(1) < 1
        assert 0 < measured.overhead_seconds < 1


async def test_a_drafter_of_another_target_is_refused(
    settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("other")
    target = tiny_target(folder / "target", seed=7)
    drafter = tiny_drafter(folder / "drafter", target)
    other = settings.model_copy(update={"target": str(target), "drafter": str(drafter)})
    with (
        verifier_server(load_target_worker(settings)) as verifier,
        drafter_server(load_draft_worker(other)) as drafter_endpoint,
    ):
        settings = settings.model_copy(
            update={"verifier_endpoint": verifier, "drafter_endpoint": drafter_endpoint}
        )
        with pytest.raises(HandshakeError, match="target_digest differs"):
            async with ready_driver(settings, None):
                pass


async def test_a_missing_drafter_does_not_stop_the_start(settings: Settings) -> None:
    with verifier_server(load_target_worker(settings)) as verifier:
        settings = settings.model_copy(
            update={
                "verifier_endpoint": verifier,
                "drafter_endpoint": "127.0.0.1:1",
                "drafter_patience": 0.1,
            }
        )
        async with ready_driver(settings, None) as driver:
            assert driver.status.verifier_ready
            assert driver.status.drafter_ready is False


async def test_a_drafter_that_joins_late_is_timed_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    with verifier_server(load_target_worker(settings)) as verifier:
        settings = settings.model_copy(
            update={
                "verifier_endpoint": verifier,
                "drafter_endpoint": f"127.0.0.1:{port}",
                "drafter_patience": 0.1,
                "planner": "fixed:3",
            }
        )

        async def joined() -> StepCost:
            async with ready_driver(settings, None) as driver:
                running = asyncio.create_task(driver.run())
                assert driver.cost is not None
                assert driver.cost.draft is None
                stream = driver.submit(request([1, 2, 3], 300))
                with drafter_server(load_draft_worker(settings), settings.drafter_endpoint):
                    await until(lambda: driver.status.drafter_ready)
                    await collect(stream)
                running.cancel()
                return driver.cost

        cost = await joined()
        assert 0 < cost.draft_seconds(1) < 1

        async def timed_again(*arguments: object) -> list[tuple[int, float]]:
            raise AssertionError("the profile in the cache was not used")

        monkeypatch.setattr(costs, "time_drafts", timed_again)
        assert await joined() == cost


@pytest.mark.parametrize("precision", ["fp16w", "bf16"])
def test_workers_whose_q_would_differ_are_refused(settings: Settings, precision: str) -> None:
    other = settings.model_copy(update={"precision": precision})
    target, drafter = load_target_worker(settings).info, load_draft_worker(other).info
    with pytest.raises(HandshakeError, match=rf"\({precision}\) has .*\(fp32\).*--precision"):
        check_drafter_fits(drafter, target)


async def test_a_missing_verifier_does(settings: Settings) -> None:
    settings = settings.model_copy(
        update={"verifier_endpoint": "127.0.0.1:1", "startup_timeout": 0.1}
    )
    with pytest.raises(WorkerUnavailableError, match=r"verifier at 127\.0\.0\.1:1"):
        async with ready_driver(settings, None):
            pass
