"""How every service's process starts, listens to signals, and fails: with one clear line."""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from dspark.core.errors import DSparkError
from dspark.ops.logging import configure_logging
from dspark.ops.settings import Settings, load_settings

log = logging.getLogger(__name__)

REFUSED = 2  # exit status: started wrongly, starting again will not help
CRASHED = 1

KILL_AFTER_SECONDS = 5.0  # beyond the grace that requests in flight get


def new_incarnation() -> int:
    """A random 64-bit name of this process start."""
    return secrets.randbits(64)


def start(service: str, argv: Sequence[str] | None) -> Settings:
    """Load the settings of a service's process, set up its logs and say both."""
    arguments = sys.argv[1:] if argv is None else argv
    settings = load_settings(arguments, program=f"dspark-{service}")
    configure_logging(service, settings.log_level)
    log.info("settings", extra=settings.model_dump())
    if settings.supervised:
        _stop_with_stdin(settings.shutdown_grace)
    return settings


@contextlib.contextmanager
def one_line_failures(service: str) -> Iterator[None]:
    """Turn an exception into one log line and a non-zero exit status."""
    configure_logging(service, "info")
    try:
        yield
    except DSparkError as error:
        log.error("%s", error)
        sys.exit(REFUSED)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception:
        log.critical("crashed", exc_info=True)
        logging.shutdown()
        # A model's thread may be in the middle of a step; nobody waits for it any more.
        os._exit(CRASHED)


def _stop_with_stdin(grace: float) -> None:
    """Stop this process, as SIGTERM would, once the other end of its stdin is closed.

    The system closes it however the process at that end dies. What has not stopped after ``grace``
    seconds and a few ends without: nobody is there any more to kill it.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace + KILL_AFTER_SECONDS)
        os._exit(CRASHED)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; call it inside the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def wait_for_signal() -> None:
    """Block the main thread until SIGTERM or SIGINT."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
