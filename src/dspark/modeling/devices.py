"""Where tensors live and products are computed."""

import torch

from dspark.core.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, ...

    Raises:
        ConfigError: torch knows no such device, or finds none on this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}; choose cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} was asked for, and torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices here; use --device cpu"
        )
    return device
