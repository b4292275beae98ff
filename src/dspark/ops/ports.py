"""Where the services of one machine listen."""

import contextlib
import socket

from dspark.core.errors import ConfigError
from dspark.ops.settings import Settings

_PORTS_TRIED = 50


def place(settings: Settings) -> Settings:
    """Give every service a port: the workers any free one, the API its own or the next free one.

    Raises:
        ConfigError: the API port is taken and was asked for, or all that follow are taken too.
    """
    drafter, verifier, any_port = free_ports(settings.host, 3)
    return settings.model_copy(
        update={
            "port": _api_port(settings) or any_port,
            "drafter_port": drafter,
            "verifier_port": verifier,
            "drafter_endpoint": f"{settings.host}:{drafter}",
            "verifier_endpoint": f"{settings.host}:{verifier}",
        }
    )


def listening_socket(host: str, port: int) -> socket.socket:
    """A TCP socket bound to the address.

    Raises:
        ConfigError: it cannot be bound.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _api_port(settings: Settings) -> int:
    """The port that was asked for, or the first free one from the default on."""
    if "port" not in settings.model_fields_set:
        for port in range(settings.port, settings.port + _PORTS_TRIED):
            with contextlib.suppress(ConfigError):
                listening_socket(settings.host, port).close()
                return port
    listening_socket(settings.host, settings.port).close()
    return settings.port


def free_ports(host: str, count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    listeners = [listening_socket(host, 0) for _ in range(count)]  # all at once: all different
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
