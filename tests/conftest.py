"""What every test shares: one torch thread, and the tiny models of `tests.support.tiny`."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny import tiny_target

    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_drafter_folder(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    from tests.support.tiny import tiny_drafter

    return tiny_drafter(tmp_path_factory.mktemp("drafter"), tiny_target_folder)


@pytest.fixture(scope="session")
def tiny_settings_argv(
    tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path, tiny_drafter_folder: Path
) -> list[str]:
    """Flags that start any service on the tiny models."""
    return [
        f"--target={tiny_target_folder}",
        f"--drafter={tiny_drafter_folder}",
        f"--cache={tmp_path_factory.mktemp('cache')}",
        "--served-model-name=tiny",
        "--precision=fp32",
        "--threads=1",
        "--kv-tokens=4096",
        "--port=0",
        "--drafter-port=0",
        "--verifier-port=0",
    ]


@pytest.fixture(scope="session")
def toy_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target of 40 tokens, whose answers `toy_shards` holds."""
    from tests.support.tiny import tiny_target

    return tiny_target(tmp_path_factory.mktemp("toy-target"), vocab_size=40)


@pytest.fixture(scope="session")
def toy_shards(toy_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with 48 of its answers to train on, to be left as they are."""
    from tests.support.responses import write_responses

    folder = tmp_path_factory.mktemp("toy-shards")
    write_responses(folder, toy_target, count=48)
    return folder
