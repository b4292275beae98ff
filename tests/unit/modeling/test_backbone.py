"""Greedy decoding through the packed, paged engine equals `transformers.generate`, in fp32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark.core.errors import TargetError
from dspark.data import load_prompts
from dspark.modeling.backbone import LocalBackbone, PackedStep, Span
from dspark.modeling.head import LocalHead
from dspark.modeling.kv import BlockPool
from dspark.modeling.targets import resolve_target
from tests.support.tiny import Family, tiny_target

FAMILIES: tuple[Family, ...] = ("llama", "qwen3")


def decode(
    backbone: LocalBackbone,
    head: LocalHead,
    prompts: list[list[int]],
    max_new: int,
    chunk: int = 1000,
    arrive_every: int = 0,
) -> list[list[int]]:
    """Greedy outputs; request i joins at step i * arrive_every, prompts go in by chunks."""
    shape = backbone.kv.shape
    pool = BlockPool(shape.num_blocks, shape.block_size)
    tokens = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    tables = [pool.allocate(-(-(len(p) + max_new) // shape.block_size)) for p in prompts]
    step = 0
    while True:
        live = [
            i
            for i, prompt in enumerate(prompts)
            if step >= i * arrive_every and len(tokens[i]) < len(prompt) + max_new
        ]
        if not live and step >= len(prompts) * arrive_every:
            return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
        step += 1
        if not live:
            continue
        spans = [Span(tables[i], done[i], min(chunk, len(tokens[i]) - done[i])) for i in live]
        new = [
            tokens[i][span.start : span.start + span.length]
            for i, span in zip(live, spans, strict=True)
        ]
        packed = PackedStep(torch.tensor([t for part in new for t in part]), tuple(spans))
        hidden = backbone.forward(packed).hidden
        last = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        following = head.logits(hidden[last]).argmax(-1).tolist()
        for i, span, token in zip(live, spans, following, strict=True):
            done[i] += span.length
            if done[i] == len(tokens[i]):
                tokens[i].append(token)


def generate(folder: Path, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new,
            min_new_tokens=max_new,
            eos_token_id=None,
            do_sample=False,
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs


def random_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        for length in (5, 23, 1, 40, 17, 8)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_alone_and_mixed(family: Family, tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target", family=family)
    prompts = random_prompts(264)
    expected = generate(folder, prompts, 20)
    backbone = LocalBackbone(folder, "fp32", (), num_blocks=128, block_size=4)
    head = LocalHead.from_folder(folder, "fp32")
    assert [decode(backbone, head, [p], 20)[0] for p in prompts] == expected
    assert decode(backbone, head, prompts, 20) == expected
    assert decode(backbone, head, prompts, 20, chunk=7, arrive_every=3) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_taps_are_the_models_own(family: Family, tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target", family=family, num_layers=3)
    backbone = LocalBackbone(folder, "fp32", (0, 2), num_blocks=16, block_size=4)
    ids = torch.arange(1, 12)
    output = backbone.forward(PackedStep(ids, (Span(range(3), 0, 11),)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
    layers: dict[int, torch.Tensor] = {}
    for index in (0, 2):
        model.layers[index].register_forward_hook(
            lambda module, args, out, index=index: layers.update({index: out[0]})
        )
    with torch.no_grad():
        final = model(ids[None]).last_hidden_state[0]
    tapped = torch.cat([layers[0], layers[2]], dim=-1)
    torch.testing.assert_close(output.hidden, final, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(output.taps, tapped, atol=1e-4, rtol=1e-4)


def test_tapping_a_layer_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target")
    with pytest.raises(TargetError, match=r"not all in 0\.\.1"):
        LocalBackbone(folder, "fp32", (2,), num_blocks=4)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks .*layers\.1\.mlp\.up_proj"):
        LocalBackbone(folder, "fp32", (), num_blocks=4)


def test_an_unreadable_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "target")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(TargetError, match="cannot be loaded"):
        LocalBackbone(folder, "fp32", (), num_blocks=4)


def test_without_taps_the_output_has_none(tmp_path: Path) -> None:
    backbone = LocalBackbone(tiny_target(tmp_path / "target"), "fp32", (), num_blocks=4)
    output = backbone.forward(PackedStep(torch.tensor([1]), (Span([0], 0, 1),)))
    assert output.taps.shape == (1, 0)


@pytest.mark.slow
def test_smollm2_equals_transformers_on_real_prompts() -> None:
    folder = resolve_target()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.prompt}], add_generation_prompt=True, return_dict=False
        )
        for p in load_prompts(limit=6)
    ]
    expected = generate(folder, prompts, 24)
    backbone = LocalBackbone(folder, "fp32", (1, 14, 27), num_blocks=256)
    head = LocalHead.from_folder(folder, "fp32")
    assert decode(backbone, head, prompts[:1], 24) == expected[:1]
    assert decode(backbone, head, prompts, 24, chunk=32, arrive_every=2) == expected
