"""Chains against the written-out definition, token by token, over the whole sequence anew."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from dspark.modeling.drafters.chain import ChainDrafter
from dspark.modeling.drafters.interface import teacher_forced
from tests.support.drafters import HIDDEN, VOCAB, random_config, random_model


def rms(module, x: Tensor) -> Tensor:
    return module.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


@torch.no_grad()
def outputs(model: ChainDrafter, embedded: Tensor, hidden: Tensor) -> Tensor:
    """The layer over pairs [N, d] at positions 0..N-1, each seeing those up to itself."""
    config, layer, n = model.config, model.layer, len(hidden)
    if config.method == "eagle3":
        normed = torch.cat(
            (rms(layer.input_layernorm, embedded), rms(layer.hidden_norm, hidden)), 1
        )
        rows = hidden
    else:
        both = torch.cat((rms(layer.enorm, embedded), rms(layer.hnorm, hidden)), 1)
        rows = both @ layer.eh_proj.weight.T
        normed = rms(layer.input_layernorm, rows)
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            rope_parameters=dict(config.rope_parameters),
        )
    )
    attention = layer.self_attn
    q, k, v = (
        (normed @ proj.weight.T).view(1, n, -1, config.head_dim).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if config.qk_norm:
        q, k = rms(attention.q_norm, q), rms(attention.k_norm, k)
    q, k = apply_rotary_pos_emb(q, k, *rotary(rows, torch.arange(n)[None]))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    rows = rows + mixed[0].transpose(0, 1).reshape(n, -1) @ attention.o_proj.weight.T
    normed, mlp = rms(layer.post_attention_layernorm, rows), layer.mlp
    gate = torch.nn.functional.silu(normed @ mlp.gate_proj.weight.T)
    return rows + (gate * (normed @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T


def by_definition(model: ChainDrafter, features: Tensor, tokens: Tensor, drafted: Tensor) -> Tensor:
    """Rows that draft after the last of tokens [L + 1], with `drafted` as the tokens drafted."""
    hidden, after = features, tokens[1:]
    rows = []
    for k in range(model.config.block_size):
        out = outputs(model, model.embedding[after], hidden)[-1]
        rows.append(rms(model.norm, out))
        # The output stands for the feature of the place before the token just drafted.
        hidden = torch.cat((hidden, out[None]))
        after = torch.cat((after, drafted[k : k + 1]))
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", ["eagle3", "mtp1"])
def test_a_chain_is_what_the_definition_says(method: str, family: str) -> None:
    model = random_model(random_config(method=method, family=family))
    assert isinstance(model, ChainDrafter)
    torch.manual_seed(1)
    features = model.fuse(torch.randn(12, 2 * HIDDEN)).detach()
    tokens = torch.randint(VOCAB, (13,))
    positions = torch.tensor([1, 5, 12])
    size = model.config.block_size
    previous = torch.cat((tokens[positions][:, None], torch.randint(VOCAB, (3, size - 1))), 1)
    with torch.no_grad():
        rows = teacher_forced(model.open_blocks(features, tokens, positions, size), previous)
    for row, position, before in zip(rows, positions.tolist(), previous, strict=True):
        expected = by_definition(model, features[:position], tokens[: position + 1], before[1:])
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)


def test_an_anchor_without_a_past_starts_from_nothing() -> None:
    model = random_model(random_config(method="eagle3"))
    blocks = model.open_blocks(
        torch.randn(3, HIDDEN), torch.tensor([1, 2, 3, 4]), torch.tensor([0]), 4
    )
    assert not blocks.rows(torch.tensor([1])).any()
    assert blocks.rows(torch.tensor([5])).any()
