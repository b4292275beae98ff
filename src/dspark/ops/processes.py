"""How this project's services are started as processes of this machine."""

import os
import sys

from dspark.ops.settings import ENV_PREFIX, Settings

# Two torch processes share the cores and work in turns. OpenMP threads must bridge the gap between
# two kernels of a forward by spinning (waking a sleeping one costs more than a small kernel), and
# must soon sleep when the other process's turn comes. This many spins are a fraction of a
# millisecond. And glibc must keep large buffers instead of returning them after every step.
_TUNING = {
    "GOMP_SPINCOUNT": "20000",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "20000000000",
    "PYTHONUNBUFFERED": "1",
}


def service_command(service: str) -> list[str]:
    """The command line of a service: drafter, verifier or scheduler."""
    return [sys.executable, "-m", f"dspark_services.{service}"]


def service_environment(settings: Settings) -> dict[str, str]:
    """The environment a service needs to run with exactly these settings. What the caller's own
    environment says about threads and memory wins over the tuning here."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
    threads = {"OMP_NUM_THREADS": str(settings.num_threads)}
    return _TUNING | threads | inherited | settings.to_environment()
