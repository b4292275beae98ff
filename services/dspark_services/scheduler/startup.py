"""From settings to a driver that is ready to run: meet the workers, know the costs, build the
engine.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from dspark.core.errors import WorkerUnavailableError
from dspark.core.planner import parse_planner
from dspark.engine.admission import Limits
from dspark.engine.engine import Engine
from dspark.engine.ports import DrafterPort, VerifierPort
from dspark.ops.settings import Settings
from dspark.ops.state import open_store
from dspark_services.process import new_incarnation
from dspark_services.scheduler.calibrations import CalibrationBook
from dspark_services.scheduler.clients import GrpcDrafter, GrpcVerifier
from dspark_services.scheduler.costs import CostBook
from dspark_services.scheduler.driver import Driver
from dspark_services.scheduler.handshake import check_drafter_fits, wait_for_worker
from dspark_services.scheduler.observer import Observer
from dspark_services.scheduler.profile import Workers, run_dummy

log = logging.getLogger(__name__)

_SAVE_EVERY_SECONDS = 60.0


class Verifier(VerifierPort, Protocol):
    async def close(self) -> None: ...


class Drafter(DrafterPort, Protocol):
    async def close(self) -> None: ...


@asynccontextmanager
async def ready_driver(settings: Settings, observer: Observer | None) -> AsyncIterator[Driver]:
    """A driver whose workers have been met; the connections end with the context.

    Raises:
        WorkerUnavailableError: no verifier answered within the start-up timeout.
        HandshakeError: the workers do not fit each other.
    """
    store = open_store(settings.state, settings.cache_dir / "state")
    incarnation = new_incarnation()
    verifier, drafter = await _connect(settings, incarnation)
    try:
        workers = await _meet(settings, verifier, drafter)
        limits = Limits(
            max_running=settings.max_running,
            max_prefill_tokens=settings.max_prefill_tokens,
            max_batch_tokens=settings.max_batch_tokens,
        )
        book = CostBook(
            store,
            settings.num_threads,
            settings.transport,
            limits,
            reprofile=settings.reprofile,
        )
        cost = await book.of(workers)
        time_drafter = None
        if cost is not None and drafter is not None and workers.drafter_info is None:
            features, _ = await run_dummy(workers)  # now: later it would disturb requests
            time_drafter = partial(book.with_drafter, workers, features)
        engine = Engine(
            incarnation=incarnation,
            target=workers.target,
            planner=parse_planner(settings.planner),
            cost=cost,
            limits=limits,
            cap_accept_every=settings.cap_accept_every,
            lookup=settings.has_lookup,
        )
        calibrations = CalibrationBook(store)
        driver = Driver(
            engine,
            workers.target,
            verifier,
            drafter,
            verifier_deadline=settings.verifier_deadline,
            max_waiting=settings.max_waiting,
            time_drafter=time_drafter,
            refresh_cost=True,
            recall=calibrations.of,
            observer=observer,
        )
        saving = asyncio.create_task(_save_now_and_then(book, driver, calibrations))
        try:
            yield driver
        finally:
            saving.cancel()
            await book.keep(driver.cost)
            await calibrations.save()
    finally:
        await store.close()
        await verifier.close()
        if drafter is not None:
            await drafter.close()


async def _save_now_and_then(book: CostBook, driver: Driver, calibrations: CalibrationBook) -> None:
    """So that a scheduler that is killed, or another beside it, starts with recent knowledge."""
    while True:
        await asyncio.sleep(_SAVE_EVERY_SECONDS)
        await book.keep(driver.cost)
        await calibrations.save()


async def _connect(settings: Settings, incarnation: int) -> tuple[Verifier, Drafter | None]:
    if settings.transport == "inproc":
        return await _load_inproc(settings)
    verifier = GrpcVerifier(settings.verifier_endpoint, incarnation, settings.verify_timeout)
    if not settings.has_drafter:
        return verifier, None
    return verifier, GrpcDrafter(settings.drafter_endpoint, incarnation, settings.draft_timeout)


async def _load_inproc(settings: Settings) -> tuple[Verifier, Drafter | None]:
    # Imported here: with gRPC workers this process has no use for torch, which takes seconds.
    from dspark_services.compute import ComputeThread
    from dspark_services.models import load_draft_worker, load_target_worker
    from dspark_services.scheduler.inproc import InprocDrafter, InprocVerifier

    thread = ComputeThread("models")
    target = await thread.run(load_target_worker, settings)
    verifier = InprocVerifier(target, thread, settings.verify_timeout)
    if not settings.has_drafter:
        return verifier, None
    draft = await thread.run(load_draft_worker, settings)
    return verifier, InprocDrafter(draft, thread, settings.draft_timeout)


async def _meet(settings: Settings, verifier: Verifier, drafter: Drafter | None) -> Workers:
    log.info("waiting for the verifier")
    target = await wait_for_worker(verifier.handshake, settings.startup_timeout)
    info = None
    if drafter is not None:
        log.info("waiting for the drafter")
        try:
            info = await wait_for_worker(drafter.handshake, settings.drafter_patience)
        except WorkerUnavailableError as error:
            log.warning("starting without the drafter, it may join later: %s", error)
        else:
            check_drafter_fits(info, target)
    return Workers(verifier, target, drafter, info)
