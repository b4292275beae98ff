"""The services under measurement: one drafter and one verifier, and a scheduler for each planner.

All schedulers talk to the same workers and take turns, so that planners are compared on the same
loaded models, within one run.
"""

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from dspark.core.errors import WorkerUnavailableError
from dspark.modeling.targets import resolve_target
from dspark.ops.ports import free_ports, place
from dspark.ops.processes import service_command, service_environment
from dspark.ops.settings import Settings

_READY_SECONDS = 180.0
_STOP_SECONDS = 15.0


@contextlib.contextmanager
def running_system(
    settings: Settings, planners: Sequence[str], log_file: Path
) -> Iterator[dict[str, str]]:
    """Start everything, yield the URL of each planner's scheduler, stop everything.

    Raises:
        WorkerUnavailableError: a process ended or was not ready in time; `log_file` says why.
    """
    folder = resolve_target(settings.target, settings.cache_dir)
    settings = place(settings.model_copy(update={"port": 0}))
    settings = settings.model_copy(
        update={
            "target": str(folder),
            "served_model_name": settings.model_name,
            "supervised": True,
        }
    )
    processes: list[subprocess.Popen[bytes]] = []
    with log_file.open("ab") as log:

        def launch(service: str, own: Settings) -> None:
            processes.append(
                subprocess.Popen(
                    service_command(service),
                    env=service_environment(own),
                    stdin=subprocess.PIPE,  # never written to: it closes when this process dies
                    stdout=log,
                    stderr=log,
                )
            )

        try:
            if settings.transport == "grpc":
                launch("verifier", settings)
                if settings.has_drafter:
                    launch("drafter", settings)
            urls = {}
            # The workers may not have bound theirs yet, which so look free.
            taken = (settings.verifier_port, settings.drafter_port)
            spare = free_ports(settings.host, len(planners) + len(taken))
            ports = [port for port in spare if port not in taken]
            for planner, port in zip(planners, ports, strict=False):
                own = settings.model_copy(update={"planner": planner, "port": port})
                launch("scheduler", own)
                urls[planner] = f"http://{settings.host}:{port}"
                _wait_ready(urls[planner], processes, log_file)
            yield urls
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                if process.stdin is not None:
                    process.stdin.close()


def _wait_ready(url: str, processes: list[subprocess.Popen[bytes]], log_file: Path) -> None:
    """Ready with everything it was configured for: a drafter that joins late would be missed."""
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            raise WorkerUnavailableError(f"a service ended while starting; see {log_file}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise WorkerUnavailableError(f"no service at {url} after {_READY_SECONDS:g} s; see {log_file}")
