import asyncio
import signal

from dspark_services.supervisor import Service, _keep_running

from dspark.ops.processes import service_environment
from dspark.ops.settings import Settings


async def test_a_signal_while_a_service_starts_stops_it_too() -> None:
    stop = asyncio.Event()
    service = Service("drafter", 0, service_environment(Settings()))
    running = asyncio.create_task(_keep_running(service, asyncio.Event(), stop))
    while service.process is None:
        stop.set()
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        assert await running == -signal.SIGTERM
