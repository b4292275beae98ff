"""Structured logs: one line an event, ``time level service message key=value ...``, on stderr."""

import json
import logging
import sys

_BUILT_IN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class KeyValueFormatter(logging.Formatter):
    """Renders what ``extra=`` carries as ``key=value``; JSON where a value has spaces or quotes."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        when = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        parts = [when, record.levelname.lower(), self._service, record.getMessage()]
        parts += [f"{k}={_render(v)}" for k, v in vars(record).items() if k not in _BUILT_IN]
        line = " ".join(parts)
        # A traceback stays on the event's line: one event, one line, whatever reads the log.
        return (
            line
            if record.exc_info is None
            else f"{line} traceback={json.dumps(self.formatException(record.exc_info))}"
        )


def configure_logging(service: str, level: str) -> None:
    """Send this process's logs to stderr at ``level`` and above."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "asyncio", "filelock", "huggingface_hub", "uvicorn"):
        logging.getLogger(noisy).setLevel("WARNING")


def _render(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return (
        text
        if text and text.isprintable() and not set(text) & {" ", '"', "="}
        else json.dumps(text)
    )
