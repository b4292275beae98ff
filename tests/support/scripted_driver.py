"""Stands in for the driver where a test has to decide when which event comes."""

from dspark_services.scheduler.driver import DriverStatus
from dspark_services.scheduler.streams import EventStream

from dspark.core.errors import OverloadedError
from dspark.core.types import SequenceKey, TargetInfo
from dspark.engine.events import GateState, GateStatus, SequenceEvent, Usage
from dspark.engine.request import FinishReason, Request
from tests.support.tiny import TINY_VOCAB

USAGE = Usage(3, 2, 1, steps=2, proposed=5, admitted=4, accepted=1)


class ScriptedDriver:
    """Takes up to `room` requests; the test plays the engine with `say`."""

    target = TargetInfo(1, "tiny", "t", "h", "f", TINY_VOCAB, 512, 64, 16, "fp32", "cpu")
    cost = None

    def __init__(self, room: int = 10) -> None:
        self.room = room
        self.streams: list[EventStream] = []
        self.requests: list[Request] = []
        self.cancelled: list[int] = []

    @property
    def status(self) -> DriverStatus:
        return DriverStatus(
            True, None, 0, len(self.streams), False, GateStatus(GateState.OFF, "none")
        )

    def submit(self, request: Request) -> EventStream:
        if len(self.streams) == self.room:
            raise OverloadedError(f"{self.room} requests are waiting already")
        self.requests.append(request)
        self.streams.append(EventStream(SequenceKey(1, len(self.streams))))
        return self.streams[-1]

    def cancel(self, key: SequenceKey) -> None:
        self.cancelled.append(key.sequence)

    def say(self, index: int, text: str, finish: FinishReason | None = None) -> None:
        """One step committed one token for the sequence."""
        usage = None if finish is None else USAGE
        key = self.streams[index].key
        self.streams[index].push(SequenceEvent(key, (1,), text, 4, 0, finish, usage))
