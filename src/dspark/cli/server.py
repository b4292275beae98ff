"""A server of a command's own, for as long as the command needs it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from dspark.bench.system import running_system
from dspark.core.errors import WorkerUnavailableError
from dspark.modeling.targets import resolve_target
from dspark.ops.settings import Settings


@contextmanager
def private_server(settings: Settings, console: Console) -> Iterator[str]:
    """Start the services with these settings on free ports; yields the URL.

    Raises:
        WorkerUnavailableError: a service did not start; the last lines of the log say why.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        resolve_target(settings.target, settings.cache_dir, progress=console.print)
        console.print(f"starting {settings.model_name} ...", style="dim")
        try:
            with running_system(settings, (settings.planner,), log) as urls:
                yield urls[settings.planner]
        except WorkerUnavailableError as error:
            lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
            raise WorkerUnavailableError("\n".join([str(error), *lines[-5:]])) from error
