"""`dspark up`: the three services as processes of this machine, started, watched and stopped
together.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import httpx

from dspark.modeling.targets import resolve_target
from dspark.ops.ports import place
from dspark.ops.processes import service_command, service_environment
from dspark.ops.settings import Settings, load_settings
from dspark_services.process import (
    KILL_AFTER_SECONDS,
    REFUSED,
    one_line_failures,
    stop_on_signals,
)

log = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS = 0.5
_LONGEST_BACKOFF_SECONDS = 15.0
_STABLE_SECONDS = 60.0  # a process that lived this long earned its restarts back


@dataclass(slots=True)
class Service:
    """One process: how it is started, and how often it may come back after a crash."""

    name: str
    max_restarts: float  # in a row; infinity: for ever
    environment: dict[str, str]
    process: asyncio.subprocess.Process | None = field(default=None, init=False)

    async def start(self) -> asyncio.subprocess.Process:
        # A session of its own: Ctrl-C reaches the supervisor alone, which then stops in order.
        self.process = await asyncio.create_subprocess_exec(
            *service_command(self.name),
            env=self.environment,
            stdin=asyncio.subprocess.PIPE,  # never written to: it closes when this process dies
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return self.process

    async def stop(self, grace: float) -> None:
        if self.process is None or self.process.returncode is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), grace)
        except TimeoutError:
            log.warning("%s did not stop within %g s; killing it", self.name, grace)
            self.process.kill()
            await self.process.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Run until a signal, or until a service is gone for good; then exit with a status."""
    with one_line_failures("up"):
        settings = load_settings(sys.argv[1:] if argv is None else argv, program="dspark up")
        logging.getLogger().setLevel(settings.log_level.upper())
        sys.exit(asyncio.run(supervise(settings)))


async def supervise(settings: Settings) -> int:
    """Start everything, announce the URL, keep it running; returns the exit status."""
    stop = stop_on_signals()
    settings = place(settings)
    log.info("preparing the target %s", settings.model_name)
    folder = await asyncio.to_thread(
        resolve_target, settings.target, settings.cache_dir, progress=log.info
    )
    if stop.is_set():
        return 0
    settings = settings.model_copy(
        update={"target": str(folder), "served_model_name": settings.model_name}
    )
    services = _services(settings)
    ready = asyncio.Event()
    watchers = [asyncio.create_task(_keep_running(service, ready, stop)) for service in services]
    announcing = asyncio.create_task(_announce(settings, ready))
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*watchers, stopping], return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping")
    stop.set()
    announcing.cancel()
    *workers, scheduler = services
    grace = settings.shutdown_grace + KILL_AFTER_SECONDS
    await scheduler.stop(grace)  # first: the workers have to finish what is in flight
    await asyncio.gather(*(worker.stop(grace) for worker in workers))
    await asyncio.wait(watchers)
    failures = [watcher.result() for watcher in watchers if watcher in done]
    return failures[0] if failures else 0


async def _keep_running(service: Service, ready: asyncio.Event, stop: asyncio.Event) -> int:
    """Restart the service after crashes; returns its exit status when it is gone for good."""
    restarts = 0
    while True:
        started = monotonic()
        process = await service.start()
        if stop.is_set():  # while it started, so whoever stops the others has not seen it
            process.terminate()
        log.info("started the %s", service.name, extra={"pid": process.pid})
        await _relay(service.name, process)
        status = await process.wait()
        if stop.is_set():
            return status
        if monotonic() - started > _STABLE_SECONDS:
            restarts = 0
        # Before everything was ready once, a failure is more likely a wrong set-up than a crash.
        if status == REFUSED or not ready.is_set() or restarts >= service.max_restarts:
            log.error("the %s ended for good", service.name, extra={"status": status})
            return status or 1
        backoff = min(_FIRST_BACKOFF_SECONDS * 2**restarts, _LONGEST_BACKOFF_SECONDS)
        restarts += 1
        log.warning(
            "the %s died; starting it again", service.name, extra={"status": status, "in": backoff}
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), backoff)
            return status


async def _relay(name: str, process: asyncio.subprocess.Process) -> None:
    """Copy the output of a process, each line under its name, until it ends."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        sys.stdout.write(f"{name:9} | {line.decode(errors='replace').rstrip()}\n")
        sys.stdout.flush()


async def _announce(settings: Settings, ready: asyncio.Event) -> None:
    """Wait until the API is ready; then say where it is and how to try it."""
    url = f"http://{settings.host}:{settings.port}"
    async with httpx.AsyncClient(trust_env=False) as client:
        while not ready.is_set():
            await asyncio.sleep(0.2)
            try:
                response = await client.get(f"{url}/ready")
            except httpx.TransportError:
                continue  # not listening yet
            if response.status_code == httpx.codes.OK:
                ready.set()
    message = {"role": "user", "content": "Why is the sky blue?"}
    body = json.dumps({"model": settings.model_name, "messages": [message], "max_tokens": 64})
    sys.stdout.write(
        f"\nReady: {url}\nTry it:\n\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n\n"
    )
    sys.stdout.flush()


def _services(settings: Settings) -> list[Service]:
    """In the order they are started, the scheduler last."""
    environment = service_environment(settings.model_copy(update={"supervised": True}))
    services = []
    if settings.transport == "grpc":
        services.append(Service("verifier", 3, environment))
        if settings.has_drafter:
            services.append(Service("drafter", float("inf"), environment))
    services.append(Service("scheduler", 0, environment))
    return services


if __name__ == "__main__":
    main()
