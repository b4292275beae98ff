import json
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.config import DrafterConfig
from tests.support.drafters import random_config
from tests.support.tiny import tiny_target


def write(folder: Path, config: DrafterConfig, **changes: object) -> Path:
    raw = {**json.loads(config.to_json()), **changes}
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return path


def test_json_round_trip(tmp_path: Path) -> None:
    config = random_config(family="qwen3", inject_previous_feature=True, target_digest="ab")
    assert DrafterConfig.from_json(write(tmp_path, config)) == config


def test_a_published_config_of_the_old_rope_form_is_read(tmp_path: Path) -> None:
    config = random_config(draft_vocab_size=0)
    path = write(
        tmp_path,
        config,
        dspark_serve=None,
        rope_parameters=None,
        rope_theta=5e5,
        num_anchors=512,
        torch_dtype="bfloat16",
    )
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert DrafterConfig.from_json(path) == replace(config, rope_parameters=rope)


def test_unknown_fields_are_refused_in_our_own_section_only(tmp_path: Path) -> None:
    path = write(tmp_path, random_config(), dspark_serve={"draft_vocab_sise": 5})
    with pytest.raises(DrafterError, match="draft_vocab_sise"):
        DrafterConfig.from_json(path)


@pytest.mark.parametrize("field", ["target_layer_ids", "block_size", "hidden_size"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    with pytest.raises(DrafterError, match=field):
        DrafterConfig.from_json(write(tmp_path, random_config(), **{field: None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gemma4"}, "family 'gemma4'"),
        ({"markov_head_type": "rnn"}, "Markov head 'rnn'"),
        ({"enable_confidence_head": False}, "confidence head"),
        ({"target_layer_ids": (2, 1)}, "rise strictly"),
        ({"target_layer_ids": (1, 4)}, "within 0..3"),
        ({"target_layer_ids": ()}, "target_layer_ids"),
        ({"mask_token_id": 80}, "mask_token_id 80"),
        ({"block_size": 0}, "block_size"),
        ({"draft_vocab_size": 81}, "draft_vocab_size"),
        ({"num_key_value_heads": 3}, "multiple"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        random_config(**changes)


def test_the_shape_comes_from_the_target(tmp_path: Path) -> None:
    target = tiny_target(tmp_path, family="qwen3", num_layers=3)
    config = DrafterConfig.for_target(
        target,
        target_layer_ids=(1,),
        num_hidden_layers=1,
        block_size=3,
        mask_token_id=0,
        markov_rank=4,
    )
    assert config.qk_norm
    assert (config.hidden_size, config.head_dim, config.num_target_layers) == (32, 8, 3)


@pytest.mark.parametrize(
    ("changes", "message"), [({"attention_bias": True}, "bias"), ({"hidden_act": "gelu"}, "gelu")]
)
def test_unsupported_layers_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(DrafterError, match=message):
        DrafterConfig.from_json(write(tmp_path, random_config(), **changes))
