"""Cost surfaces of a deployment: kept in the state store, measured where they are missing."""

import json
import logging
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from dspark.core.cost import Curve, ProfileKey, StepCost
from dspark.core.errors import ConfigError, DSparkError, WorkerUnavailableError
from dspark.core.types import DrafterInfo
from dspark.engine.admission import Limits
from dspark.ops.state import StateStore
from dspark_services.scheduler.profile import Workers, measure, time_drafts

log = logging.getLogger(__name__)

_HEADLINE = (1, 16)  # batch sizes whose times tell a person whether a profile is plausible
_AGES = (("days", 86400), ("hours", 3600), ("minutes", 60))


class CostBook:
    """Looks a profile up under what it is valid for, and measures it if there is none."""

    def __init__(
        self,
        store: StateStore,
        threads: int,
        transport: str,
        limits: Limits,
        *,
        reprofile: bool = False,
    ) -> None:
        """``threads`` that workers compute with, and the ``transport`` to them; ``limits`` of the
        steps to come; ``reprofile``: measure what is kept already."""
        self._store = store
        self._threads = threads
        self._transport = transport
        self._limits = limits
        self._reprofile = reprofile
        self._open: ProfileKey | None = None  # what the surface in use is valid for
        self._kept: StepCost | None = None  # what the store has under that key

    async def of(self, workers: Workers) -> StepCost | None:
        """The cost surface of workers that have been met, before they serve; None if there is
        neither one nor a way to measure it.

        Raises:
            WorkerUnavailableError: a worker went away meanwhile.
        """
        key = self._key(workers)
        cost = await self._read(key)
        if cost is None:
            log.info("measuring what steps cost on this machine (a few seconds)")
            started = time.perf_counter()
            try:
                cost = await measure(workers, self._limits)
            except WorkerUnavailableError:
                raise
            except DSparkError as error:  # a cache too small, or full of another scheduler's work
                log.warning("what steps cost cannot be measured: %s", error)
                return None
            log.info("cost profile measured", extra={"seconds": time.perf_counter() - started})
            await self._write(key, cost)
        self._open = key
        return cost

    async def with_drafter(
        self,
        workers: Workers,
        features: bytes,
        cost: StepCost,
        info: DrafterInfo,
        turn: AbstractAsyncContextManager[None],
    ) -> StepCost:
        """``cost`` of a target that serves alone, with the drafts of a drafter that joins it.

        ``features`` are those of `run_dummy`; the drafter is timed call by call, each within
        ``turn``.

        Raises:
            WorkerUnavailableError: the drafter went away meanwhile.
        """
        key = self._key(replace(workers, drafter_info=info))
        known = await self._read(key)
        if known is None:
            assert workers.drafter is not None, "only a deployment with a drafter is joined by one"
            drafts = await time_drafts(workers.drafter, info, self._limits, features, turn)
            log.info("drafts measured while serving", extra={"seconds": dict(drafts)})
            known = replace(cost, draft=Curve.through(drafts))
            await self._write(key, known)
        self._open = key
        return known

    async def keep(self, cost: StepCost | None) -> None:
        """Save what became of the surface that was handed out last."""
        if self._open is not None and cost is not None and cost != self._kept:
            await self._save(self._open, cost)
            log.debug("cost profile kept: %s", headline(cost))

    def _key(self, workers: Workers) -> ProfileKey:
        drafter = workers.drafter_info
        return ProfileKey(
            target_digest=workers.target.target_digest,
            drafter_digest=drafter.fusion_digest if drafter else "",
            device=workers.target.device,
            precision=workers.target.precision,
            threads=self._threads,
            transport=self._transport,
        )

    async def _read(self, key: ProfileKey) -> StepCost | None:
        text = None if self._reprofile else await self._store.get(_name(key))
        if text is None:
            return None
        try:
            cost = StepCost.from_json(text, key)
        except ConfigError as error:
            log.warning("%s", error)
            return None
        log.info(
            "cost profile of %s: %s; `dspark profile` measures it again",
            _age(json.loads(text).get("measured_at")),
            headline(cost),
        )
        self._kept = cost
        return cost

    async def _write(self, key: ProfileKey, cost: StepCost) -> None:
        log.info("cost profile: %s", headline(cost))
        await self._save(key, cost)

    async def _save(self, key: ProfileKey, cost: StepCost) -> None:
        self._kept = cost
        profile = json.loads(cost.to_json(key)) | {"measured_at": time.time()}
        await self._store.put(_name(key), json.dumps(profile, indent=2))


def headline(cost: StepCost) -> str:
    """What a person compares with what they expect of the machine."""
    times = (f"{float(cost.verify_seconds(n, n, 0)) * 1e3:.1f} ms for {n}" for n in _HEADLINE)
    return f"a target step takes {' and '.join(times)} tokens"


def _name(key: ProfileKey) -> str:
    return f"cost:{key.digest()}"


def _age(measured_at: float | None) -> str:
    """Since a time in seconds of the epoch, in words."""
    if measured_at is None:
        return "unknown age"
    seconds = max(time.time() - measured_at, 0.0)
    for unit, length in _AGES:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"
