"""The compose file against the code: no Docker needed to catch a renamed setting or command."""

import tomllib
from pathlib import Path

import pytest
import yaml

from dspark.ops.settings import load_settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


@pytest.mark.parametrize("name", ["drafter", "scheduler", "verifier"])
def test_environment_is_settings(name: str) -> None:
    load_settings(environ=SERVICES[name].get("environment", {}))


@pytest.mark.parametrize("name", ["drafter", "scheduler", "verifier"])
def test_command_is_installed(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert SERVICES[name]["command"] in project["scripts"]


def test_endpoints_name_services_and_their_ports() -> None:
    environment = SERVICES["scheduler"]["environment"]
    for worker in ("drafter", "verifier"):
        host, port = environment[f"DSPARK_{worker.upper()}_ENDPOINT"].split(":")
        assert SERVICES[host]["expose"] == [port]
        assert getattr(load_settings(environ={}), f"{worker}_port") == int(port)


def test_state_is_the_redis_service() -> None:
    assert SERVICES["scheduler"]["environment"]["DSPARK_STATE"] == "redis://redis:6379/0"
    assert "redis" in SERVICES


def test_image_environment_is_settings() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    environment = dict(
        word.split("=", 1) for line in lines if line.startswith("ENV ") for word in line.split()[1:]
    )
    own = {name: value for name, value in environment.items() if name.startswith("DSPARK_")}
    assert load_settings(environ=own).host == "0.0.0.0"
