import json
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.config import DrafterConfig
from tests.support.drafters import METHODS, random_config
from tests.support.tiny import tiny_target


def write(folder: Path, config: DrafterConfig, **changes: object) -> Path:
    raw = {**json.loads(config.to_json()), **changes}
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return path


@pytest.mark.parametrize("kind", METHODS)
def test_json_round_trip(tmp_path: Path, kind: str) -> None:
    config = random_config(
        **METHODS[kind], family="qwen3", inject_previous_feature=True, target_digest="ab"
    )
    assert DrafterConfig.from_json(write(tmp_path, config)) == config


@pytest.mark.parametrize("kind", ["dspark", "gated", "rnn", "dflash", "eagle3"])
def test_a_published_config_of_the_old_rope_form_is_read(tmp_path: Path, kind: str) -> None:
    config = random_config(**METHODS[kind], draft_vocab_size=0)
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
        ({"markov_head_type": "lstm"}, "Markov head 'lstm'"),
        ({"method": "medusa"}, "method 'medusa'"),
        ({"markov_rank": 0}, "needs markov_rank above 0"),
        ({"method": "dflash", "markov_rank": 8}, "needs markov_rank to be 0"),
        ({"method": "dflash", "enable_confidence_head": True}, "no confidence head"),
        ({"method": "eagle3", "num_hidden_layers": 2}, "one layer"),
        ({"method": "mtp1", "block_size": 2}, "one token"),
        ({"method": "dflash2", "conv_group_size": 5}, "conv_group_size"),
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
