import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.core.errors import DrafterError
from dspark.core.types import Scaling
from dspark.modeling.drafters.checkpoint import (
    load_calibration,
    load_drafter,
    save_drafter,
)
from dspark.modeling.drafters.families import tensor_shapes
from dspark.modeling.drafters.shared import load_shared
from dspark.modeling.targets import target_digest
from tests.support.drafters import METHODS, model_on, random_config, random_model
from tests.support.tiny import tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), vocab_size=64)


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    model = model_on(
        target, draft_vocab_size=30, inject_previous_feature=True, markov_head_type="gated"
    )
    save_drafter(model, tmp_path / "drafter", card="# A drafter\n")
    return tmp_path / "drafter"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("inject", [False, True])
@pytest.mark.parametrize("draft_vocab_size", [0, 50])
@pytest.mark.parametrize("kind", METHODS)
def test_the_tensors_of_a_checkpoint_are_known_without_making_a_model(
    family: str, inject: bool, draft_vocab_size: int, kind: str
) -> None:
    config = random_config(
        **METHODS[kind],
        family=family,
        inject_previous_feature=inject,
        draft_vocab_size=draft_vocab_size,
    )
    state = random_model(config).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == tensor_shapes(config)


def test_a_round_trip_is_exact_to_the_bit(target: Path, drafter: Path, tmp_path: Path) -> None:
    model = load_drafter(drafter, target)
    save_drafter(model, tmp_path / "again")
    names = ("config.json", "model.safetensors")
    assert all((drafter / n).read_bytes() == (tmp_path / "again" / n).read_bytes() for n in names)
    original = model_on(
        target, draft_vocab_size=30, inject_previous_feature=True, markov_head_type="gated"
    )
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.bfloat16().to(tensor.dtype))


def test_frozen_copies_are_accepted_and_the_targets_own_used(target: Path, drafter: Path) -> None:
    path = drafter / "model.safetensors"
    copies = {name: torch.zeros(64, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    expected = load_drafter(drafter, target)
    save_file({**load_file(path), **copies}, path)
    model = load_drafter(drafter, target)
    assert torch.equal(model.embedding, expected.embedding)
    assert torch.equal(model.head, expected.head)


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(drafter: Path) -> None:
        path = drafter / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def edit_tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    def edit(drafter: Path) -> None:
        path = drafter / "model.safetensors"
        tensors = {**load_file(path), **changes}
        save_file({name: t for name, t in tensors.items() if t is not None}, path)

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_config(hidden_size=576), "expects hidden size 576, target has 32"),
        (edit_config(vocab_size=65), "expects a vocabulary of 65, target has 64"),
        (edit_config(num_target_layers=30), "expects decoder layers: 30, target has 2"),
        (
            edit_config(dspark_serve={"draft_vocab_size": 30, "target_digest": "0" * 64}),
            "was trained for target digest 000000000000",
        ),
        (edit_tensors(**{"fc.weight": None}), "lacks the tensors fc.weight"),
        (edit_tensors(surprise=torch.zeros(1)), "unknown tensors surprise"),
        (edit_tensors(**{"norm.weight": torch.zeros(33)}), r"norm.weight has shape \(33,\)"),
        (lambda d: (d / "model.safetensors").write_bytes(b"torn"), "cannot be read"),
        (lambda d: (d / "model.safetensors").unlink(), "cannot be read"),
        (lambda d: (d / "config.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "config.json").write_text("[]"), "not a JSON object"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    target: Path, drafter: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(drafter)
    for load in (load_drafter, load_shared):
        with pytest.raises(DrafterError, match=message) as refusal:
            load(drafter, target)
        assert "\n" not in str(refusal.value)


def test_the_recorded_target_is_accepted(target: Path, tmp_path: Path) -> None:
    save_drafter(model_on(target, target_digest=target_digest(target)), tmp_path)
    load_drafter(tmp_path, target)


def test_calibration_is_optional_and_checked(drafter: Path, tmp_path: Path) -> None:
    config = random_config()
    assert load_calibration(drafter, config) == {}
    path = drafter / "calibration.json"
    path.write_text(json.dumps({"temperatures": {"greedy": [1, 0.9, 1.1, 2]}, "ece": {}}))
    temperatures = (1.0, 0.9, 1.1, 2.0)
    assert load_calibration(drafter, config) == {"greedy": Scaling(temperatures, (0.0,) * 4)}
    shifts = {"greedy": [0, -0.5, 0.5, 1]}
    path.write_text(json.dumps({"temperatures": {"greedy": temperatures}, "intercepts": shifts}))
    assert load_calibration(drafter, config) == {
        "greedy": Scaling(temperatures, (0.0, -0.5, 0.5, 1.0))
    }
    for bad, shift in (
        ({"greedy": [1, 1, 1]}, [0] * 4),
        ({"greedy": [1, 1, 1, 0]}, [0] * 4),
        ({"greedy": [1, 1, 1, 1]}, [0] * 3),
        ({"warm": [1, 1, 1, 1]}, None),
        ({}, [0] * 4),
        ({"greedy": [1, 1, 1, None]}, None),
        ([1, 1, 1, 1], None),
    ):
        intercepts = {} if shift is None else {"greedy": shift}
        path.write_text(json.dumps({"temperatures": bad, "intercepts": intercepts}))
        with pytest.raises(
            DrafterError, match=r"greedy needs 4|unknown verification|no calibration|and no temp"
        ):
            load_calibration(drafter, config)


def test_a_second_save_keeps_the_files_it_was_not_given(target: Path, drafter: Path) -> None:
    save_drafter(load_drafter(drafter, target), drafter, calibration={"temperatures": {}})
    assert (drafter / "README.md").read_text() == "# A drafter\n"
    shutil.rmtree(drafter)
