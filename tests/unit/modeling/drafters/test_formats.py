import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.block import BlockDrafter
from dspark.modeling.drafters.checkpoint import load_config, load_drafter, save_drafter
from dspark.modeling.drafters.formats import read_layout
from dspark.modeling.drafters.formats.deepspec import write as write_deepspec_form
from dspark.modeling.drafters.interface import Drafter, teacher_forced
from dspark.modeling.drafters.shared import load_shared
from tests.support.drafters import block_logits
from tests.support.foreign import (
    Write,
    edit,
    half_model_on,
    write_deepspec,
    write_specforge_dspark,
    write_specforge_eagle3,
    write_specforge_export,
    write_speculators,
    write_zlab,
)
from tests.support.tiny import byte_tokenizer, tiny_target

RNN, GATED = {"markov_head_type": "rnn"}, {"markov_head_type": "gated"}
DFLASH: dict[str, Any] = {"method": "dflash"}
OWN_PLACE: dict[str, Any] = {"method": "dflash", "anchor_predicts": False}
DFLASH2: dict[str, Any] = {"method": "dflash2", "anchor_predicts": False, "conv_group_size": 8}
CAPPED = {**DFLASH2, "output_multiplier": 0.25, "final_logit_softcapping": 5.0}
SLIDING2 = {**DFLASH2, "layer_windows": (5, 5)}
CAUSAL2 = {**SLIDING2, "causal_windows": True}
CONFIDENT: dict[str, Any] = {"confidence_head_with_markov": False}
FIVE_TAPS: dict[str, Any] = {"method": "eagle3", "target_layer_ids": (0, 1, 2, 3, 4)}
EAGLE3: dict[str, Any] = {"method": "eagle3", "own_head": True, "target_layer_ids": (1, 2, 4)}
REDUCED: dict[str, Any] = {"draft_vocab_size": 20}

FOLDERS: dict[str, tuple[Write, str, dict[str, Any]]] = {
    "deepspec": (write_deepspec, "DeepSpec", {}),
    "deepspec-gated": (write_deepspec, "DeepSpec", GATED),
    "deepspec-rnn": (write_deepspec, "DeepSpec", RNN),
    "deepspec-dflash": (write_deepspec, "DeepSpec", DFLASH),
    "deepspec-eagle3": (write_deepspec, "DeepSpec", FIVE_TAPS),
    "zlab": (write_zlab, "z-lab DFlash", OWN_PLACE),
    "zlab-2": (write_zlab, "z-lab DFlash 2", DFLASH2),
    "zlab-2-capped": (write_zlab, "z-lab DFlash 2", CAPPED),
    "zlab-2-sliding": (write_zlab, "z-lab DFlash 2", SLIDING2),
    "zlab-2-causal": (write_zlab, "z-lab DFlash 2", CAUSAL2),
    "zlab-mixed": (write_zlab, "z-lab DFlash", {**OWN_PLACE, "layer_windows": (5, 0)}),
    "specforge": (write_specforge_dspark, "SpecForge DSpark", {}),
    "specforge-rnn": (write_specforge_dspark, "SpecForge DSpark", RNN),
    "specforge-confidence": (write_specforge_dspark, "SpecForge DSpark", CONFIDENT),
    "specforge-export": (write_specforge_export, "SpecForge DSpark", GATED),
    "specforge-eagle3": (
        write_specforge_eagle3,
        "SpecForge EAGLE-3",
        {**EAGLE3, **REDUCED, "family": "llama", "block_size": 7},
    ),
    "speculators-dflash": (write_speculators, "speculators DFlash", OWN_PLACE),
    "speculators-dflash-reduced": (
        write_speculators,
        "speculators DFlash",
        {**OWN_PLACE, **REDUCED},
    ),
    "speculators-dspark": (write_speculators, "speculators DSpark", GATED),
    "speculators-dspark-reduced": (write_speculators, "speculators DSpark", {**RNN, **REDUCED}),
    "speculators-dspark-own-place": (
        write_speculators,
        "speculators DSpark",
        {"anchor_predicts": False},
    ),
    "speculators-dflash2": (write_speculators, "speculators DFlash 2", DFLASH2),
    "speculators-eagle3": (write_speculators, "speculators EAGLE-3", {**EAGLE3, **REDUCED}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return tiny_target(folder, family="qwen3", vocab_size=64, num_layers=6)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("llama"), vocab_size=64, num_layers=6)


def written(
    kind: str, folder: Path, target: Path, llama: Path, **more: Any
) -> tuple[Drafter, Path]:
    """The model, with the frozen parts of its target, and the target."""
    write, _, fields = FOLDERS[kind]
    home = llama if fields.get("family") == "llama" else target
    fields = {name: value for name, value in fields.items() if name != "family"}
    model = half_model_on(home, **fields, **more)
    write(model, folder)
    return model, home


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_others_wrote_is_the_model_they_wrote(
    kind: str, target: Path, llama: Path, tmp_path: Path
) -> None:
    model, home = written(kind, tmp_path, target, llama)
    assert read_layout(tmp_path, 6).format == FOLDERS[kind][1]
    loaded = load_drafter(tmp_path, home)
    assert loaded.config == replace(model.config, rope_parameters=loaded.config.rope_parameters)
    assert loaded.config.rope_parameters["rope_theta"] == 10000.0
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(loaded.state_dict()[n], expected[n]) for n in expected)
    assert loaded.head.shape == model.head.shape

    torch.manual_seed(1)
    model.embedding.copy_(loaded.embedding)  # theirs is random, the target's is what counts
    size, width = model.config.block_size, len(model.config.target_layer_ids)
    taps = torch.randn(9, width * 32)
    tokens, anchors = torch.randint(64, (10,)), torch.tensor([3, 9])
    previous = torch.randint(64, (2, size))
    with torch.no_grad():
        rows = [
            teacher_forced(m.open_blocks(m.fuse(taps), tokens, anchors, size), previous)
            for m in (model, loaded)
        ]
        logits = [
            block_logits(part, rows[0][0], previous[0])
            for part in (model, loaded, load_shared(tmp_path, home))
        ]
    assert torch.equal(*rows)
    assert torch.equal(logits[0], logits[1])
    assert torch.allclose(logits[0], logits[2], atol=1e-5)


def test_the_cap_is_the_last_thing_before_the_selector(target: Path, tmp_path: Path) -> None:
    model = half_model_on(target, **CAPPED)
    write_zlab(model, tmp_path)
    hidden = 10 * torch.randn(5, 32)
    raw = hidden @ model.head.T
    expected = 5 * torch.tanh(raw * 0.25 / 5)
    assert raw.abs().max() > 20
    for part in (load_drafter(tmp_path, target), load_shared(tmp_path, target)):
        assert torch.allclose(part.base_logits(hidden), expected, atol=1e-5)
    plain = half_model_on(target, **DFLASH2)
    write_zlab(plain, tmp_path / "plain")
    assert load_shared(tmp_path / "plain", target).digest != load_shared(tmp_path, target).digest


def test_the_draft_vocabulary_is_an_offset_for_each_draft_token(
    target: Path, tmp_path: Path
) -> None:
    model = half_model_on(target, **OWN_PLACE, **REDUCED)
    write_speculators(model, tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    assert held["d2t"].tolist() == list(range(20))  # ids 0, 2, 4, ...
    loaded = load_drafter(tmp_path, target)
    assert loaded.draft_vocab is not None
    assert loaded.draft_vocab.ids.tolist() == list(range(0, 40, 2))


def test_files_from_before_the_anchor_had_a_field_are_told_by_their_number_of_tokens(
    target: Path, tmp_path: Path
) -> None:
    for predicts in (True, False):
        model = half_model_on(target, anchor_predicts=predicts)
        write_speculators(model, tmp_path)
        edit(tmp_path, sample_from_anchor=None)
        config = load_config(tmp_path, target)
        assert (config.anchor_predicts, config.block_size) == (predicts, 4)
    edit(tmp_path, speculators_config={})
    with pytest.raises(DrafterError, match="lacks the field 'sample_from_anchor'"):
        load_config(tmp_path, target)


def test_what_a_file_leaves_to_its_target(target: Path, llama: Path, tmp_path: Path) -> None:
    taps = (1, 3)  # of six layers, for two draft layers
    write_zlab(half_model_on(target, **OWN_PLACE, target_layer_ids=taps), tmp_path)
    edit(tmp_path, num_target_layers=None, dflash_config={"mask_token_id": 0})
    config = load_config(tmp_path, target)
    assert (config.num_target_layers, config.target_layer_ids) == (6, taps)
    for write, home in ((write_speculators, target), (write_specforge_eagle3, llama)):
        write(half_model_on(home, **{**EAGLE3, "target_layer_ids": (1, 2, 3)}), tmp_path)
        section = {"eagle_config": None} if write is write_specforge_eagle3 else {}
        edit(tmp_path, **section or {"eagle_aux_hidden_state_layer_ids": None})
        with pytest.raises(DrafterError, match="eagle_aux_hidden_state_layer_ids"):
            read_layout(tmp_path)
        with pytest.raises(DrafterError, match="rise strictly"):  # 1, 2, 2: six layers are too few
            load_config(tmp_path, home)


def test_layers_with_a_window_are_causal_unless_the_file_says_not(
    target: Path, tmp_path: Path
) -> None:
    write_zlab(half_model_on(target, **SLIDING2), tmp_path)
    edit(tmp_path, is_causal=None)
    assert load_config(tmp_path, target).causal_windows


def test_a_checkpoint_in_several_files(target: Path, tmp_path: Path) -> None:
    model = half_model_on(target)
    write_deepspec(model, tmp_path)
    whole = tmp_path / "model.safetensors"
    tensors = sorted(load_file(whole).items())
    whole.unlink()
    for number, part in enumerate((tensors[:9], tensors[9:])):
        save_file(dict(part), tmp_path / f"model-0000{number + 1}-of-00002.safetensors")
    state = load_drafter(tmp_path, target).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


Damage = Callable[[Path], None]


def change(**fields: Any) -> Damage:
    return lambda folder: edit(folder, **fields)


def tensors(**changes: torch.Tensor | None) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        held = {**load_file(path), **changes}
        save_file({name: t for name, t in held.items() if t is not None}, path)

    return damage


SLIDING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("zlab", change(layer_types=SLIDING), "use_sliding_window False is not supported"),
        ("zlab", change(layer_types=["chunked"] * 2), r"layer_types \['chunked', 'chunked'\]"),
        ("zlab-mixed", change(sliding_window=None), "lacks the field 'sliding_window'"),
        ("zlab-mixed", change(is_causal=True), "is_causal True is not supported"),
        ("zlab-mixed", change(num_hidden_layers=3), r"layer_windows \[5, 0\] must be 3 numbers"),
        ("zlab", change(use_sliding_window=True, layer_types=None), "use_sliding_window True"),
        ("zlab", change(is_causal=True), "is_causal True is not supported"),
        ("zlab", change(dflash_config__causal=True), "causal True is not supported"),
        ("zlab", change(attention_bias=True), "attention_bias"),
        ("zlab", change(hidden_act="gelu"), "'gelu'"),
        ("zlab", change(model_type="gemma4"), "model_type 'gemma4' is not supported"),
        ("zlab", change(dflash_config__input_embedding_scale=50.6), "input_embedding_scale 50.6"),
        ("zlab", change(dflash_config__projector_type="domino"), "projector_type 'domino'"),
        ("zlab", change(quantization_config={"bits": 4}), "quantization_config"),
        ("zlab", change(rope_parameters={"full_attention": {"rope_theta": 1}}), "rope_parameters"),
        ("zlab", change(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        ("zlab", change(layer_types="full"), "layer_types 'full' is not supported"),
        ("zlab", change(dflash_config__output_multiplier="2"), "output_multiplier '2'"),
        ("zlab", change(block_size=None), "lacks the field 'block_size'"),
        ("zlab", change(block_size="16"), "block_size '16' is not supported"),
        ("zlab", change(block_size=1), "block_size must be a positive integer: 0"),
        ("zlab", change(dflash_config__mask_token_id=None), "lacks the field 'mask_token_id'"),
        ("zlab", change(dflash_config__target_layer_ids=[1, 6]), "within 0..5"),
        ("zlab", change(dflash_config=[]), "dflash_config"),
        ("zlab", change(num_target_layers=36), "decoder layers: 36, target has 6"),
        ("zlab", change(vocab_size=151936), "vocabulary of 151936, target has 64"),
        ("zlab", change(hidden_size=2560), "hidden size 2560, target has 32"),
        ("zlab", change(target_hidden_size=64), "target_hidden_size 64"),
        ("zlab", tensors(**{"fc.weight": torch.zeros(32, 96)}), r"\(32, 96\), expected \(32, 64\)"),
        ("zlab-2", change(dflash_config__conv_kernel_size=3), "conv_kernel_size 3"),
        ("zlab-2", change(dflash_config__selector_rank=None), "selector_rank"),
        ("specforge", change(dflash_config__projector_type="domino"), "projector_type 'domino'"),
        ("specforge-eagle3", change(fc_norm=True), "fc_norm True"),
        ("specforge-eagle3", change(norm_output=False), "norm_output False"),
        ("specforge-eagle3", tensors(**{"lm_head.weight": None}), "lacks the tensors lm_head"),
        ("deepspec", change(architectures=["Qwen3ForCausalLM"]), "is Qwen3ForCausalLM"),
        ("deepspec", change(architectures=None), "is not given"),
        ("deepspec", change(model_type="gemma4"), "family 'gemma4'"),
        ("deepspec", change(layer_types=SLIDING), "layer_types"),
        ("deepspec", change(target_layer_ids=None), "lacks the field 'target_layer_ids'"),
        ("deepspec", change(target_layer_ids=[-1, 2]), r"\[-1, 2\] must rise strictly"),
        ("speculators-dspark", change(speculators_model_type="peagle"), "'peagle'"),
        ("speculators-dspark", change(aux_hidden_state_layer_ids=[0, 2]), r"\[-1, 1\] must rise"),
        ("speculators-dspark", change(aux_hidden_state_layer_ids=2), "layer_ids 2 is not"),
        (
            "speculators-dspark",
            change(transformer_layer_config__model_type="gpt_oss"),
            "transformer_layer_config.model_type 'gpt_oss'",
        ),
        (
            "speculators-dspark",
            change(transformer_layer_config__layer_types=SLIDING),
            "transformer_layer_config.layer_types",
        ),
        ("speculators-dspark", change(draft_vocab_size=70), "draft_vocab_size exceeds"),
        (
            "speculators-dspark-reduced",
            tensors(d2t=torch.arange(20) + 1),
            "t2d and d2t name different draft vocabularies",
        ),
        (
            "speculators-dspark-reduced",
            tensors(d2t=torch.arange(20).flip(0) * 2, t2d=None),
            "rise strictly",
        ),
        ("speculators-eagle3", change(norm_before_residual=True), "norm_before_residual True"),
        ("speculators-eagle3", change(embed_requires_grad=True), "embed_requires_grad True"),
        (
            "speculators-eagle3",
            change(speculators_config__proposal_methods=[]),
            "proposal_methods.0.speculative_tokens",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_in_one_line(
    kind: str, damage: Damage, message: str, target: Path, llama: Path, tmp_path: Path
) -> None:
    _, home = written(kind, tmp_path, target, llama)
    damage(tmp_path)
    with pytest.raises(DrafterError, match=message) as refusal:
        load_drafter(tmp_path, home)
    assert "\n" not in str(refusal.value)


def test_a_drafter_of_another_tokenizer_is_told_by_its_tokens(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", family="qwen3")
    folder = tmp_path / "drafter"
    save_drafter(half_model_on(target), folder)
    byte_tokenizer().save_pretrained(folder)
    load_config(folder, target)
    raw = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    Tokenizer.from_str(json.dumps(raw)).save(str(folder / "tokenizer.json"))
    was, now = vocabulary["B"], vocabulary["A"]
    with pytest.raises(DrafterError, match=f"'A' is token {now} there, {was} in the target"):
        load_config(folder, target)


@pytest.mark.parametrize("kind", [kind for kind in FOLDERS if kind.startswith("deepspec")])
def test_deepspecs_form_round_trips_to_the_bit(kind: str, target: Path, tmp_path: Path) -> None:
    halves = half_target(tmp_path / "target", num_layers=6)
    model = half_model_on(halves, **FOLDERS[kind][2])
    first, second = tmp_path / "first", tmp_path / "second"
    model.embedding.copy_(load_file(halves / "model.safetensors")["model.embed_tokens.weight"])
    write_deepspec(model, first)
    original = (first / "model.safetensors").read_bytes()
    source = json.loads((first / "config.json").read_text()) | {"num_anchors": 99}
    for folder in (first, second):
        write_deepspec_form(load_drafter(first, halves), folder, halves, source)
        same_bytes(first, folder)
    assert (second / "model.safetensors").read_bytes() == original
    assert json.loads((second / "config.json").read_text()).get("num_anchors", 99) == 99
    again = tmp_path / "again"
    save_drafter(load_drafter(second, halves), again)
    assert load_config(again, halves) == load_config(second, halves)
    write_deepspec_form(load_drafter(again, halves), second, halves, source)
    same_bytes(first, second)


def test_released_shapes_round_trip_to_the_bit(tmp_path: Path) -> None:
    """Those of the published Qwen3-4B drafter, at a tiny width."""
    target = half_target(tmp_path / "target", num_layers=36)
    model = half_model_on(
        target,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_hidden_layers=5,
        block_size=7,
        markov_rank=16,
    )
    model.embedding.copy_(load_file(target / "model.safetensors")["model.embed_tokens.weight"])
    write_deepspec(model, tmp_path / "first")
    held = load_file(tmp_path / "first" / "model.safetensors")
    assert len(held) == 64
    loaded = load_drafter(tmp_path / "first", target)
    write_deepspec_form(loaded, tmp_path / "second", target, {})
    assert (tmp_path / "first" / "model.safetensors").read_bytes() == (
        tmp_path / "second" / "model.safetensors"
    ).read_bytes()


def half_target(folder: Path, num_layers: int) -> Path:
    """A target whose embedding and head a bf16 copy holds exactly."""
    tiny_target(folder, family="qwen3", vocab_size=64, num_layers=num_layers)
    path = folder / "model.safetensors"
    halves = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(halves, path, metadata={"format": "pt"})
    return folder


def same_bytes(first: Path, second: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (OWN_PLACE, "anchor predicts nothing"),
        (DFLASH2, "no dflash2 drafters"),
        ({"method": "mtp1"}, "no mtp1 drafters"),
        (REDUCED, r"no draft vocabularies \(this one has 20 tokens\)"),
        ({"inject_previous_feature": True}, "injected previous feature"),
        ({"output_multiplier": 2.0}, "output multiplier"),
        ({"layer_windows": (0, 4)}, "attention windows"),
        ({"method": "eagle3"}, "other than 5 taps"),
        ({**FIVE_TAPS, "own_head": True}, "head of the drafter's own"),
    ],
)
def test_what_deepspecs_form_cannot_say_is_refused(
    fields: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(DrafterError, match=message):
        write_deepspec_form(half_model_on(target, **fields), tmp_path / "out", target, {})
    assert not (tmp_path / "out").exists()


def test_deepspec_has_one_family(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="llama family"):
        write_deepspec_form(half_model_on(llama), tmp_path, llama, {})


def test_an_own_head_is_kept_and_the_targets_left_alone(target: Path, tmp_path: Path) -> None:
    model = half_model_on(target, **EAGLE3, **REDUCED)
    save_drafter(model, tmp_path)
    loaded = load_drafter(tmp_path, target)
    assert torch.equal(loaded.head, model.head)
    shared = load_shared(tmp_path, target)
    hidden = torch.randn(3, 32)
    assert torch.allclose(shared.base_logits(hidden), hidden @ model.head.T, atol=1e-5)
    assert not isinstance(loaded, BlockDrafter)
