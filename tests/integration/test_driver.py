"""The step loop over real tiny workers: workers die and return, clients leave, nothing is lost."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from dspark_services.compute import ComputeThread
from dspark_services.models import load_draft_worker, load_target_worker
from dspark_services.scheduler.inproc import InprocDrafter, InprocVerifier

from dspark.core.cost import StepCost
from dspark.core.errors import (
    InvalidRequestError,
    MessageTooLargeError,
    OverloadedError,
    WorkerUnavailableError,
)
from dspark.core.planner import (
    CapacityPlanner,
    FixedPlanner,
    NonePlanner,
    Planner,
    ThresholdPlanner,
)
from dspark.core.types import DrafterInfo, Scaling, VerifyBatch, VerifyReply
from dspark.engine.admission import Limits
from dspark.engine.events import GateState
from dspark.ops.settings import Settings, load_settings
from dspark.wire import transport as transport_limits
from tests.support.system import (
    COST,
    Losable,
    Reference,
    collect,
    request,
    running_driver,
    until,
)
from tests.support.workers import Transport, drafter_port, verifier_port

pytestmark = pytest.mark.timeout(60)

PROMPTS = [[index, 3 * index + 1, 7, 40 + index] * (1 + index % 4) for index in range(8)]
LENGTH = 40


@pytest.fixture(scope="module")
def settings(tiny_settings_argv: list[str]) -> Settings:
    return load_settings(tiny_settings_argv, {})


@pytest.fixture(scope="module")
def expected(tiny_target_folder: Path) -> list[list[int]]:
    reference = Reference(tiny_target_folder)
    return [reference.tokens(prompt, LENGTH) for prompt in PROMPTS]


@pytest.fixture
async def verifier(settings: Settings) -> Losable:
    return Losable(InprocVerifier(load_target_worker(settings), ComputeThread("verifier"), 10.0))


@pytest.fixture
async def drafter(settings: Settings) -> Losable:
    return Losable(InprocDrafter(load_draft_worker(settings), ComputeThread("drafter"), 10.0))


@pytest.mark.parametrize(
    "planner",
    [FixedPlanner(3), CapacityPlanner(), ThresholdPlanner(0.1)],
    ids=lambda planner: planner.name,
)
@pytest.mark.parametrize("transport", ["grpc", "inproc"])
async def test_output_is_the_targets_own(
    transport: Transport, planner: Planner, settings: Settings, expected: list[list[int]]
) -> None:
    async with (
        verifier_port(transport, load_target_worker(settings)) as verifier,
        drafter_port(transport, load_draft_worker(settings)) as drafter,
        running_driver(verifier, drafter, planner=planner) as (driver, recorder),
    ):
        await until(lambda: driver.status.drafter_ready)
        streams = [driver.submit(request(prompt, LENGTH)) for prompt in PROMPTS]
        assert await asyncio.gather(*map(collect, streams)) == expected
        assert recorder.accepted > 0
        assert recorder.fallbacks == []


async def test_a_dead_drafter_fails_nothing_and_drafting_resumes(
    settings: Settings, verifier: Losable, drafter: Losable, expected: list[list[int]]
) -> None:
    async with running_driver(verifier, drafter) as (driver, recorder):
        await until(lambda: driver.status.drafter_ready)
        streams = [driver.submit(request(prompt, LENGTH)) for prompt in PROMPTS]
        answers = asyncio.gather(*map(collect, streams))
        await until(lambda: recorder.proposed > 20)
        drafter.gone = True
        await until(lambda: not driver.status.drafter_ready)
        steps_without = len(recorder.steps)
        proposed_before = recorder.proposed
        await until(lambda: len(recorder.steps) > steps_without + 3)
        assert recorder.proposed == proposed_before
        worker = load_draft_worker(settings)
        drafter.restart(InprocDrafter(worker, ComputeThread("drafter"), 10.0))
        await until(lambda: recorder.proposed > proposed_before)
        assert await answers == expected
        assert recorder.fallbacks == ["drafter"]


async def test_the_cost_surface_follows_the_steps_that_are_served(
    verifier: Losable, drafter: Losable, expected: list[list[int]]
) -> None:
    async with running_driver(verifier, drafter, refresh_cost=True) as (driver, _):
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert await collect(driver.submit(request(prompt, LENGTH))) == answer
        assert driver.cost != COST


async def test_an_error_in_a_steps_accounts_ends_the_loop(
    verifier: Losable, drafter: Losable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although nobody waits for them, and no further step comes."""
    async with running_driver(verifier, drafter) as (driver, recorder):

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(recorder, "on_step", broken)
        await collect(driver.submit(request([1, 2, 3], 1)))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(recorder.loop, 10)


async def test_an_unfit_drafter_is_refused_aloud_and_a_fit_one_taken(
    verifier: Losable, drafter: Losable, caplog: pytest.LogCaptureFixture
) -> None:
    real = drafter.port.handshake

    async def other_weights() -> DrafterInfo:
        return replace(await real(), fusion_digest="another")

    async def not_calibrated() -> DrafterInfo:
        return replace(await real(), calibration={"greedy": Scaling.none(1)})

    drafter.port.handshake = other_weights
    async with running_driver(verifier, drafter) as (driver, _):
        await until(lambda: "fusion_digest differs" in caplog.text)
        drafter.port.handshake = not_calibrated
        await until(lambda: "calibrate it again" in caplog.text)
        assert not driver.status.drafter_ready
        drafter.port.handshake = real
        await until(lambda: driver.status.drafter_ready)


async def test_a_drafter_that_joins_late_is_timed_between_steps_before_it_drafts(
    verifier: Losable, drafter: Losable, expected: list[list[int]]
) -> None:
    real, verifying, steps_between = verifier.port.verify, False, []

    async def watched(batch: VerifyBatch) -> VerifyReply:
        nonlocal verifying
        verifying = True
        reply = await real(batch)
        verifying = False
        return reply

    async def time_drafter(cost: StepCost, info: DrafterInfo, turn: asyncio.Lock) -> StepCost:
        for _ in range(5):
            async with turn:
                await asyncio.sleep(0.01)
                assert not verifying
                steps_between.append(len(recorder.steps))
        assert recorder.proposed == 0
        return COST

    verifier.port.verify = watched
    drafter.gone = True
    unknown = replace(COST, draft=None)
    async with running_driver(verifier, drafter, cost=unknown, time_drafter=time_drafter) as (
        driver,
        recorder,
    ):
        streams = [driver.submit(request(prompt, LENGTH)) for prompt in PROMPTS]
        answers = asyncio.gather(*map(collect, streams))
        await until(lambda: len(recorder.steps) > 3)
        drafter.gone = False
        await until(lambda: driver.status.drafter_ready)
        assert driver.cost == COST
        assert await answers == expected
        assert recorder.proposed > 0
        assert len(set(steps_between)) == len(steps_between)  # a step after each call


async def test_a_drafter_of_unknown_cost_drafts_nothing(
    verifier: Losable, drafter: Losable, expected: list[list[int]]
) -> None:
    """Its drafts would seem to be free."""
    async with running_driver(verifier, drafter, cost=replace(COST, draft=None)) as (driver, seen):
        await until(lambda: driver.status.drafter_ready)
        assert driver.status.gate.state is GateState.NO_DATA
        assert await collect(driver.submit(request(PROMPTS[0], LENGTH))) == expected[0]
        assert seen.proposed == 0


async def test_a_request_too_large_for_a_message_fails_alone(
    settings: Settings, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_limits, "MAX_MESSAGE_BYTES", 700)
    async with (
        verifier_port("grpc", load_target_worker(settings)) as verifier,
        drafter_port("grpc", load_draft_worker(settings)) as drafter,
        running_driver(verifier, drafter) as (driver, recorder),
    ):
        await until(lambda: driver.status.drafter_ready)
        streams = [driver.submit(request(prompt, 16)) for prompt in PROMPTS[:4]]
        await until(lambda: recorder.proposed > 0)
        too_large = driver.submit(request([200] * 450, 4))
        with pytest.raises(MessageTooLargeError, match=r"takes \d+ bytes, and .* holds 700"):
            await collect(too_large)
        answers = await asyncio.gather(*map(collect, streams))
        assert answers == [tokens[:16] for tokens in expected[:4]]
        assert recorder.fallbacks == []


async def test_a_restarted_verifier_gets_every_sequence_again(
    settings: Settings, verifier: Losable, drafter: Losable, expected: list[list[int]]
) -> None:
    async with running_driver(verifier, drafter) as (driver, recorder):
        streams = [driver.submit(request(prompt, LENGTH)) for prompt in PROMPTS]
        answers = asyncio.gather(*map(collect, streams))
        await until(lambda: len(recorder.steps) > 5)
        verifier.gone = True
        await until(lambda: "verifier" in recorder.fallbacks)
        worker = load_target_worker(settings)
        verifier.restart(InprocVerifier(worker, ComputeThread("verifier"), 10.0))
        assert await answers == expected


async def test_a_lost_reply_is_asked_for_again(
    verifier: Losable, drafter: Losable, expected: list[list[int]]
) -> None:
    """The verifier did the step, its reply never arrived: the same batch must not count twice."""
    real = verifier.port.verify
    lost = iter(range(1000))

    async def lossy(batch: VerifyBatch) -> VerifyReply:
        reply = await real(batch)
        if next(lost) % 3 == 1:
            raise WorkerUnavailableError("the reply was lost by the test")
        return reply

    verifier.port.verify = lossy
    async with running_driver(verifier, drafter) as (driver, recorder):
        streams = [driver.submit(request(prompt, 12)) for prompt in PROMPTS[:3]]
        answers = await asyncio.gather(*map(collect, streams))
        assert answers == [tokens[:12] for tokens in expected[:3]]
        assert recorder.fallbacks.count("verifier") > 3


async def test_a_verifier_gone_too_long_fails_requests_and_serves_again_later(
    verifier: Losable, drafter: Losable, expected: list[list[int]]
) -> None:
    async with running_driver(verifier, drafter, verifier_deadline=0.2) as (driver, recorder):
        streams = [driver.submit(request(prompt, LENGTH)) for prompt in PROMPTS[:2]]
        await until(lambda: len(recorder.steps) > 3)
        verifier.gone = True
        for stream in streams:
            with pytest.raises(WorkerUnavailableError, match=r"gone for 0\.2 s"):
                await collect(stream)
        assert not driver.status.verifier_ready
        with pytest.raises(WorkerUnavailableError):
            driver.submit(request(PROMPTS[0], LENGTH))
        verifier.gone = False
        await until(lambda: driver.status.verifier_ready)
        assert await collect(driver.submit(request(PROMPTS[0], LENGTH))) == expected[0]


async def test_cancelling_frees_the_sequence_everywhere(
    verifier: Losable, drafter: Losable
) -> None:
    sequences = verifier.port._worker._sequences
    async with running_driver(verifier, drafter) as (driver, recorder):
        stream = driver.submit(request(PROMPTS[0], 400))
        await until(lambda: len(recorder.steps) > 5)
        assert sequences.get(stream.key) is not None
        steps = len(recorder.steps)
        driver.cancel(stream.key)
        await until(lambda: sequences.get(stream.key) is None)
        assert len(recorder.steps) <= steps + 2
        assert driver.status.running == 0


async def test_a_paused_driver_takes_no_step_and_forgets_nothing(
    verifier: Losable, drafter: Losable, expected: list[list[int]]
) -> None:
    async with running_driver(verifier, drafter) as (driver, recorder):
        early = [driver.submit(request(prompt, LENGTH)) for prompt in PROMPTS[:4]]
        answers = [asyncio.create_task(collect(stream)) for stream in early]
        await until(lambda: recorder.proposed > 20)
        await driver.pause()
        steps, calls = len(recorder.steps), verifier.calls
        answers += [
            asyncio.create_task(collect(driver.submit(request(prompt, LENGTH))))
            for prompt in PROMPTS[4:]
        ]
        await asyncio.sleep(0.2)
        await driver.pause()  # once more is no mistake
        assert driver.status.paused
        assert (len(recorder.steps), verifier.calls) == (steps, calls)
        assert not any(answer.done() for answer in answers)
        driver.resume()
        assert await asyncio.gather(*answers) == expected
        assert not driver.status.paused


async def test_a_full_queue_refuses(verifier: Losable, drafter: Losable) -> None:
    one = Limits(max_running=1)
    async with running_driver(verifier, drafter, limits=one, max_waiting=2) as (driver, _):
        for _ in range(2):
            driver.submit(request(PROMPTS[0], 400))
        with pytest.raises(OverloadedError, match="2 requests are waiting"):
            driver.submit(request(PROMPTS[0], 400))


async def test_without_a_drafter_nothing_is_drafted(
    verifier: Losable, expected: list[list[int]]
) -> None:
    async with running_driver(verifier, None) as (driver, recorder):
        assert driver.status.drafter_ready is None
        assert await collect(driver.submit(request(PROMPTS[0], LENGTH))) == expected[0]
        assert recorder.proposed == 0


async def test_a_planner_that_never_drafts_leaves_the_drafter_alone(
    verifier: Losable, drafter: Losable, expected: list[list[int]]
) -> None:
    async with running_driver(verifier, drafter, planner=NonePlanner()) as (driver, _):
        await until(lambda: driver.status.drafter_ready)
        calls = drafter.calls
        assert await collect(driver.submit(request(PROMPTS[0], LENGTH))) == expected[0]
        assert drafter.calls == calls


async def test_a_defect_ends_the_loop_with_its_error(verifier: Losable, drafter: Losable) -> None:
    async def broken(batch: VerifyBatch) -> VerifyReply:
        raise InvalidRequestError("the engine built nonsense")

    verifier.port.verify = broken
    async with running_driver(verifier, drafter) as (driver, recorder):
        driver.submit(request(PROMPTS[0], 4))
        with pytest.raises(InvalidRequestError, match="nonsense"):
            await recorder.loop


async def test_the_parts_of_a_step_add_up(verifier: Losable, drafter: Losable) -> None:
    async with running_driver(verifier, drafter) as (driver, recorder):
        await until(lambda: driver.status.drafter_ready)
        await collect(driver.submit(request(PROMPTS[0], LENGTH)))
    for _, timing in recorder.steps:
        parts = (timing.draft, timing.plan, timing.verify, timing.wire, timing.commit)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(timing.total, rel=1e-6, abs=1e-6)
        assert timing.backbone + timing.head <= timing.verify
