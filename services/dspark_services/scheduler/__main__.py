"""`dspark-scheduler`: the HTTP API at once, the step loop as soon as the workers are met."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence

import uvicorn

from dspark.modeling.targets import resolve_target
from dspark.ops.metrics import Metrics
from dspark.ops.ports import listening_socket
from dspark.ops.settings import Settings
from dspark_services.process import one_line_failures, start, stop_on_signals
from dspark_services.scheduler.api.app import create_app
from dspark_services.scheduler.api.gateway import Gateway
from dspark_services.scheduler.api.text import TargetText
from dspark_services.scheduler.metering import MetricsObserver
from dspark_services.scheduler.startup import ready_driver

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """Leaves the signals to this process, which has more to stop than the HTTP server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_failures("scheduler"):
        settings = start("scheduler", argv)
        asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    gateway = Gateway(settings, Metrics(settings.model_name))
    listener = listening_socket(settings.host, settings.port)
    server = _Server(
        uvicorn.Config(
            create_app(gateway),
            log_config=None,
            access_log=False,
            lifespan="off",  # the application has none, and its task would complain of being ended
            timeout_graceful_shutdown=round(settings.shutdown_grace),
        )
    )
    serving = asyncio.create_task(server.serve([listener]))
    driving = asyncio.create_task(_drive(settings, gateway))
    stopping = asyncio.create_task(stop_on_signals().wait())
    log.info("listening", extra={"port": listener.getsockname()[1]})
    await asyncio.wait({serving, driving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if driving.done():
        driving.result()  # the loop never ends by itself: this raises what broke it
    log.info("stopping")
    server.should_exit = True
    await serving  # requests in flight are answered first
    driving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await driving


async def _drive(settings: Settings, gateway: Gateway) -> None:
    """Meet the workers, open the API for requests, and step until cancelled."""
    folder = await asyncio.to_thread(
        resolve_target, settings.target, settings.cache_dir, progress=log.info
    )
    text = await asyncio.to_thread(TargetText.from_folder, folder)
    async with ready_driver(settings, MetricsObserver(gateway.metrics)) as driver:
        gateway.open(driver, text)
        log.info("ready")
        await driver.run()


if __name__ == "__main__":
    main()
