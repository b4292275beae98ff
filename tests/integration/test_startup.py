"""Meeting the workers: who fits, what steps cost, and what is remembered for the next start."""

from pathlib import Path

import pytest
from dspark_services.models import load_draft_worker, load_target_worker
from dspark_services.scheduler import profile
from dspark_services.scheduler.startup import make_planner, ready_driver

from dspark.core.errors import HandshakeError, WorkerUnavailableError
from dspark.core.planner import CausalPlanner, FixedPlanner, NonePlanner
from dspark.ops.settings import Settings, load_settings
from tests.support.tiny import tiny_drafter, tiny_target
from tests.support.workers import drafter_port, drafter_server, verifier_port, verifier_server


@pytest.fixture
def settings(tiny_settings_argv: list[str], tmp_path: Path) -> Settings:
    return load_settings([*tiny_settings_argv, f"--cache={tmp_path}"], {})


async def test_the_cost_profile_is_measured_once(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings.model_copy(update={"transport": "inproc"})
    async with ready_driver(settings, None) as driver:
        assert driver.status.verifier_ready
    assert len(list((settings.cache_dir / "state").glob("*.json"))) == 1

    async def measured_again(workers: profile.Workers) -> None:
        raise AssertionError("the profile in the cache was not used")

    monkeypatch.setattr(profile, "measure", measured_again)
    async with ready_driver(settings, None):
        pass


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


async def test_a_missing_verifier_does(settings: Settings) -> None:
    settings = settings.model_copy(
        update={"verifier_endpoint": "127.0.0.1:1", "startup_timeout": 0.1}
    )
    with pytest.raises(WorkerUnavailableError, match=r"verifier at 127\.0\.0\.1:1"):
        async with ready_driver(settings, None):
            pass


def test_planners_by_name() -> None:
    assert isinstance(make_planner("causal"), CausalPlanner)
    assert isinstance(make_planner("none"), NonePlanner)
    fixed = make_planner("fixed:12")
    assert isinstance(fixed, FixedPlanner)
    assert fixed.name == "fixed:12"
