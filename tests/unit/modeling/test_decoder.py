from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dspark.modeling.attention_groups import Span
from dspark.modeling.attention_plan import plan_attention
from dspark.modeling.decoder import PackedDecoder
from dspark.modeling.fused import rotate
from dspark.modeling.kv import KVCache, KVShape


def test_rotation_is_the_one_of_transformers() -> None:
    torch.manual_seed(0)
    heads, angles = torch.randn(5, 3, 8), torch.rand(5, 4) * 6
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    first, second = sin.chunk(2, dim=-1)
    signed = torch.cat((-first, second), dim=-1)
    rotate(heads, cos[:, None], signed[:, None], out=heads)
    torch.testing.assert_close(heads, expected)


@pytest.mark.parametrize("num_rows", [7, 16])
@pytest.mark.parametrize("kind", [(LlamaModel, LlamaConfig), (Qwen3Model, Qwen3Config)])
def test_biases_are_taken_along_and_padding_changes_nothing(
    kind: tuple[Any, Any], num_rows: int
) -> None:
    """The shipped target has no biases; other models of the families do."""
    model_class, config_class = kind
    torch.manual_seed(0)
    mlp = {"mlp_bias": True} if config_class is LlamaConfig else {}
    config = config_class(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, attention_bias=True, **mlp,
    )  # fmt: skip
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    ids = torch.arange(7)
    cache = KVCache(KVShape(2, 2, 8, 8, 4), torch.float32)
    plan = plan_attention([Span(range(2), 0, 7)], cache, 2, num_rows)
    with torch.inference_mode():
        expected = model(ids[None], output_hidden_states=True)
        hidden, (tap,) = PackedDecoder(model, "fp32", (0,))(ids, plan)
    torch.testing.assert_close(hidden, expected.last_hidden_state[0], atol=1e-5, rtol=1e-4)
    assert len(hidden) == len(tap) == len(ids)
    torch.testing.assert_close(tap, expected.hidden_states[1][0], atol=1e-5, rtol=1e-4)
