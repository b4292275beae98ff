"""Writes constraints.txt: the exact versions of everything installed in this environment."""

from importlib.metadata import distributions
from pathlib import Path

HEADER = """\
# Exact versions for a reproducible set-up (`make lock` rewrites this file).
# torch is pinned without its build tag: pip then takes the CPU build where the index offers one.
"""
BOOTSTRAP = {"pip", "setuptools", "wheel", "dspark-serve"}


def main() -> None:
    pins = {
        dist.name.lower().replace("_", "-"): dist.version.split("+")[0] for dist in distributions()
    }
    lines = [f"{name}=={version}" for name, version in sorted(pins.items())]
    lines = [line for line in lines if line.split("==")[0] not in BOOTSTRAP]
    path = Path(__file__).parents[1] / "constraints.txt"
    path.write_text(HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
