"""Output text of one sequence, token by token, with stop strings."""

from dspark.engine.request import Detokenizer


class TextStream:
    """Detokenizes, gives text out as soon as it is safe, and ends at the first stop string.

    Text is held back only while it may be the beginning of a stop string. So every match lies in
    the held and the new text together, however many tokens it spans, and nothing that was given out
    ever has to be taken back. Of several stop strings the one that completes first in the text
    wins, whatever their order in the request; of those that complete at the same character, the
    one that began first.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...] = ()) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._held = ""
        self._ready = ""

    def push(self, token: int) -> bool:
        """Add a token; True when it completes a stop string. Nothing may be added after that."""
        return self._feed(self._detokenizer.push(token))

    def flush(self) -> bool:
        """The output ends here: release everything. True when even that completes a stop string."""
        stopped = self._feed(self._detokenizer.flush())
        self._ready += self._held
        self._held = ""
        return stopped

    def take(self) -> str:
        """Text that became safe since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def _feed(self, text: str) -> bool:
        if not self._stop:
            self._ready += text
            return False
        pending = self._held + text
        matches = [
            (start + len(stop), start) for stop in self._stop if (start := pending.find(stop)) >= 0
        ]
        if matches:
            _, start = min(matches)
            self._ready += pending[:start]
            self._held = ""
            return True
        safe = len(pending) - max(_overlap(pending, stop) for stop in self._stop)
        self._ready += pending[:safe]
        self._held = pending[safe:]
        return False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
