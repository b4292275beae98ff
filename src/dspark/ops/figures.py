"""Pictures for reports. Needs matplotlib (the extra `reports`), which is imported when one is
made."""

from pathlib import Path
from typing import Any

from dspark.core.errors import ConfigError

_HEIGHT = 4.2  # inches


def new_figure(panels: int = 1) -> tuple[Any, list[Any]]:
    """A figure and its axes, side by side. Raises ConfigError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "pictures need matplotlib: pip install 'dspark-serve[reports]'"
        ) from error
    width = 6.4 if panels == 1 else 4.8 * panels
    figure = Figure(figsize=(width, _HEIGHT), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for each in axes:
        each.grid(alpha=0.3)
    return figure, axes


def save_figure(figure: Any, file: Path) -> None:
    """Write .svg, .png or what else the name says. Raises ConfigError if that cannot be done."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture {file} cannot be written: {error}") from error
