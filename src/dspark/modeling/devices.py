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
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; choose cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        reason = (
            f"it sees {torch.cuda.device_count()} of them"
            if torch.version.cuda
            else "it was built without CUDA: install another build"
        )
        raise ConfigError(f"torch {torch.__version__} has no device {name} here: {reason}")
    return device
