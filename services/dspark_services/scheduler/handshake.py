"""Meeting the workers: waiting until they are up, and refusing those that do not fit."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TypeVar

from dspark.core.errors import HandshakeError, WorkerUnavailableError
from dspark.core.types import DrafterInfo, TargetInfo

log = logging.getLogger(__name__)

Info = TypeVar("Info")

FIRST_RETRY_SECONDS = 0.05
"""Before a worker that went away is asked again; each further wait is twice as long."""

LONGEST_RETRY_SECONDS = 2.0

_POLL_SECONDS = 0.2


async def wait_for_worker(handshake: Callable[[], Awaitable[Info]], patience: float) -> Info:
    """Repeat a handshake until it is answered, for at most ``patience`` seconds.

    Raises:
        WorkerUnavailableError: nobody answered in time.
        HandshakeError: somebody answered who does not fit.
    """
    deadline = perf_counter() + patience
    while True:
        try:
            return await handshake()
        except WorkerUnavailableError:
            if perf_counter() >= deadline:
                raise
        await asyncio.sleep(_POLL_SECONDS)


def check_drafter_fits(drafter: DrafterInfo, target: TargetInfo) -> None:
    """Refuse a drafter whose target or shared parts are not the verifier's.

    Raises:
        HandshakeError: names the digest that differs, on both sides.
    """
    for name in ("target_digest", "fusion_digest"):
        theirs, ours = getattr(drafter, name), getattr(target, name)
        if theirs != ours:
            raise HandshakeError(
                f"{name} differs: drafter {drafter.name} ({drafter.precision}) has "
                f"{_short(theirs)}, the verifier of {target.model_id} ({target.precision}) has "
                f"{_short(ours)}; start both with the same --target, --drafter and --precision"
            )


def check_same_target(returned: TargetInfo, before: TargetInfo) -> None:
    """Refuse a verifier that came back with another model than the one that left.

    Raises:
        HandshakeError: names the field that differs.
    """
    digests = ("target_digest", "head_digest", "fusion_digest")
    for name in (*digests, "max_context", "num_blocks", "block_size"):
        was, now = getattr(before, name), getattr(returned, name)
        if was != now:
            raise HandshakeError(
                f"{name} differs: the verifier had {_short(was)} and came back with {_short(now)}; "
                "restart the scheduler to serve another model"
            )


def _short(value: object) -> str:
    return f"{str(value)[:12]}" or "none"
