"""Meeting the workers: who fits, what steps cost, and what is remembered for the next start."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from dspark_services.models import load_draft_worker, load_target_worker
from dspark_services.scheduler import costs, profile, startup
from dspark_services.scheduler.driver import Driver
from dspark_services.scheduler.handshake import check_drafter_fits
from dspark_services.scheduler.metering import MetricsObserver
from dspark_services.scheduler.startup import ready_driver

from dspark.core.cost import StepCost
from dspark.core.errors import HandshakeError, WorkerUnavailableError
from dspark.core.types import DraftBatch, DraftReply
from dspark.engine.admission import Limits
from dspark.engine.events import GateState
from dspark.ops.metrics import Metrics
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

    async def measured_again(*arguments: object) -> StepCost:
        raise AssertionError("the profile in the cache was not used")

    monkeypatch.setattr(costs, "measure", measured_again)
    for seconds, age in ((300, "5 minutes"), (3 * 3600, "3 hours"), (40 * 86400, "40 days")):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(stored | {"measured_at": time.time() - seconds}))
        async with ready_driver(settings, None):
            pass
        assert f"cost profile of {age} ago: a target step takes" in caplog.text


async def test_drafts_are_timed_on_sequences_that_the_drafter_holds(settings: Settings) -> None:
    """A drafter that holds something else drafts nothing, which takes no time."""
    worker, replies = load_draft_worker(settings), []

    class Watched:
        info = worker.info

        def draft(self, batch: DraftBatch) -> DraftReply:
            replies.append(worker.draft(batch))
            return replies[-1]

    async with (
        verifier_port("inproc", load_target_worker(settings)) as verifier,
        drafter_port("inproc", Watched()) as drafter,
    ):
        target, info = await verifier.handshake(), await drafter.handshake()
        limits = Limits(max_running=20)
        cost = await profile.measure(profile.Workers(verifier, target, drafter, info), limits)
    assert cost.draft is not None
    assert cost.draft.counts == (1, 4, 16, 20)
    opening, *drafting, closing = replies
    assert [len(reply.drafts) for reply in drafting] == [1, 4, 16, 20] * 4
    drafts = [draft for reply in drafting for draft in reply.drafts]
    assert all(draft.in_sync and len(draft.tokens) == info.block_size for draft in drafts)
    assert len(opening.drafts) == 20
    assert not closing.drafts


async def test_a_profile_is_measured_anew_on_demand(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings.model_copy(update={"transport": "inproc"})
    async with ready_driver(settings, None):
        pass

    async def measured_again(*arguments: object) -> StepCost:
        return COST

    monkeypatch.setattr(costs, "measure", measured_again)
    for reprofile, used in ((False, False), (True, True), (False, True)):  # and kept
        wanted = settings.model_copy(update={"reprofile": reprofile})
        async with ready_driver(wanted, None) as driver:
            assert (driver.cost == COST) is used


async def kept_profile(settings: Settings) -> Path:
    """What a first start measured and kept."""
    async with ready_driver(settings, None):
        pass
    (path,) = (settings.cache_dir / "state").glob("*.json")
    return path


async def test_a_damaged_profile_is_measured_again(settings: Settings) -> None:
    settings = settings.model_copy(update={"transport": "inproc"})
    path = await kept_profile(settings)
    good = path.read_text()
    path.write_text(good[: len(good) // 2])
    async with ready_driver(settings, None):
        pass
    assert path.read_text().endswith("}")


async def test_a_profile_of_another_machine_is_refused_in_one_line(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings.model_copy(update={"transport": "inproc"})
    path = await kept_profile(settings)
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"key": stored["key"] | {"device": "cuda", "threads": 64}}))
    caplog.clear()
    async with ready_driver(settings, None):
        pass
    (refusal,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "measured with another device, threads: profile again" in refusal.getMessage()
    assert json.loads(path.read_text())["key"] == stored["key"]


async def test_the_next_start_goes_on_with_what_serving_taught(settings: Settings) -> None:
    settings = settings.model_copy(update={"transport": "inproc"})
    async with ready_driver(settings, None) as driver, stepping(driver):
        measured = driver.cost
        await collect(driver.submit(request([1, 2, 3], 300)))
        learned = driver.cost
    assert learned != measured
    async with ready_driver(settings, None) as driver:
        assert driver.cost == learned


async def test_a_scheduler_that_is_killed_leaves_recent_costs(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_SAVE_EVERY_SECONDS", 0.01)
    settings = settings.model_copy(update={"transport": "inproc"})
    async with ready_driver(settings, None) as driver, stepping(driver):
        (path,) = (settings.cache_dir / "state").glob("*.json")
        before = path.read_text()
        await collect(driver.submit(request([1, 2, 3], 300)))
        await until(lambda: path.read_text() != before)


async def test_flat_costs_are_called_no_data_everywhere_and_nothing_is_drafted(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings.model_copy(update={"transport": "inproc"})
    path = await kept_profile(settings)
    stored = json.loads(path.read_text())
    flat = {"tokens": {"counts": [1, 512], "seconds": [0.01, 0.01]}, "head_row_seconds": 0.0}
    path.write_text(json.dumps(stored | {"cost": stored["cost"] | flat}))
    await assert_no_data(settings, caplog, "the cost profile is flat")


async def test_a_cache_too_small_to_measure_anything_serves_without_drafts(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings.model_copy(update={"transport": "inproc", "kv_tokens": 48})
    await assert_no_data(settings, caplog, "no cost profile")
    assert "what steps cost cannot be measured: " in caplog.text


async def assert_no_data(settings: Settings, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    metrics = Metrics("tiny")
    async with ready_driver(settings, MetricsObserver(metrics)) as driver, stepping(driver):
        await until(lambda: driver.status.drafter_ready)
        assert len(await collect(driver.submit(request([1, 2, 3], 20)))) == 20
        gate = driver.status.gate
    assert gate.state is GateState.NO_DATA
    assert gate.reason.startswith(reason)
    assert 'dspark_gate_state{state="no-data"} 1.0' in metrics.render().decode()
    assert "dspark_proposed_tokens_total{" not in metrics.render().decode()
    assert f"decoding without drafts: {reason}" in caplog.text


@asynccontextmanager
async def stepping(driver: Driver) -> AsyncIterator[None]:
    running = asyncio.create_task(driver.run())
    try:
        yield
    finally:
        running.cancel()


async def test_measured_costs_make_sense(settings: Settings) -> None:
    async with (
        verifier_port("grpc", load_target_worker(settings)) as verifier,
        drafter_port("grpc", load_draft_worker(settings)) as drafter,
    ):
        workers = profile.Workers(
            verifier, await verifier.handshake(), drafter, await drafter.handshake()
        )
        cost = await profile.measure(workers, Limits())
        again = await profile.measure(
            workers, Limits()
        )  # leaves nothing behind that disturbs another
    for measured in (cost, again):
        assert 0 < float(measured.verify_seconds(1, 1, 0)) < 1
        assert 0 < measured.draft_seconds(1) < 1
        assert 0 < measured.overhead_seconds < 1
        assert measured.tokens.counts[-1] >= Limits().max_batch_tokens
        assert measured.draft is not None
        assert measured.draft.counts[-1] == Limits().max_running


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
        assert (await joined()).draft == cost.draft


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
