"""What was learnt about drafters' confidences, kept in the state store."""

import hashlib
import json
import logging
from dataclasses import asdict

from dspark.core.errors import ConfigError
from dspark.core.types import DrafterInfo
from dspark.engine.calibrator import Calibrator
from dspark.ops.state import StateStore

log = logging.getLogger(__name__)


class CalibrationBook:
    """One calibrator for each drafter, under what identifies it and its target: a drafter that
    restarts, or a scheduler that does, goes on with what was learnt."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._calibrators: dict[str, Calibrator] = {}

    async def of(self, info: DrafterInfo) -> Calibrator:
        """The calibrator of a drafter that has been met. Raises DrafterError if the drafter's own
        calibration does not cover its block."""
        name = _name(info)
        if name not in self._calibrators:
            self._calibrators[name] = await self._read(name, info)
        return self._calibrators[name]

    async def save(self) -> None:
        """Write down what was learnt until now."""
        for name, calibrator in self._calibrators.items():
            if calibrator.has_learnt:
                await self._store.put(name, calibrator.to_json())

    async def _read(self, name: str, info: DrafterInfo) -> Calibrator:
        text = await self._store.get(name)
        calibrator = Calibrator(info)
        if text is None:
            return calibrator
        try:
            calibrator.restore(text)
        except ConfigError as error:
            log.warning("%s: %s It is learnt afresh.", name, error)
            return Calibrator(info)
        log.info("confidences of %s: what was learnt before is used", info.name)
        return calibrator


def _name(info: DrafterInfo) -> str:
    """What is learnt corrects the drafter's own calibration, so that is part of its name."""
    own = {mode: asdict(scaling) for mode, scaling in info.calibration.items()}
    identity = [info.fusion_digest, info.target_digest, info.block_size, own]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"calibration:{digest[:16]}"
