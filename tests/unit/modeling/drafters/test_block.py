"""The two forward paths against each other, and both against the written-out definition."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.block import BlockDrafter
from dspark.modeling.drafters.families import new_drafter
from dspark.modeling.drafters.served_block import ServedBlocks
from tests.support.drafters import HIDDEN, VOCAB, random_config, random_model

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen3"])
NO_TOKENS = torch.empty(0, dtype=torch.int64)
INJECTION = pytest.mark.parametrize("inject", [False, True])


def random_blocks(**changes: object) -> BlockDrafter:
    model = random_model(random_config(**changes))
    assert isinstance(model, BlockDrafter)
    return model


def features_of(model: BlockDrafter, length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return model.fuse(torch.randn(length, 2 * HIDDEN, generator=generator)).detach()


def one_shot(model: BlockDrafter, features: Tensor, anchor: int) -> Tensor:
    """The serving path with the whole context given at once."""
    served = ServedBlocks(model, "fp32")
    context = served.new_context()
    if len(features):
        served.extend([context], features, NO_TOKENS, [len(features)])
    return served.forward_step([context], torch.tensor([anchor]))[0]


def by_definition(model: BlockDrafter, features: Tensor, anchor: int) -> Tensor:
    """One block, head by head, with transformers' own rotation and norms."""
    config, size, start = model.config, model.config.block_size, len(features)
    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[config.family]
    rotary = LlamaRotaryEmbedding(
        kind(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            rope_parameters=dict(config.rope_parameters),
        )
    )

    def norm(module: torch.nn.Module, x: Tensor) -> Tensor:
        reference = Qwen3RMSNorm(x.shape[-1], eps=config.rms_norm_eps)
        reference.weight = module.weight
        return reference(x)

    masks = model.embedding[[config.mask_token_id] * (size - 1)]
    x = torch.cat((model.embedding[[anchor]], masks))
    cos, sin = rotary(x, torch.arange(start + size)[None])
    for layer in model.layers:
        attention = layer.self_attn
        a = norm(layer.input_layernorm, x)
        both = torch.cat((features, a))
        q = attention.q_proj(a).view(1, size, -1, config.head_dim).transpose(1, 2)
        k = attention.k_proj(both).view(1, start + size, -1, config.head_dim).transpose(1, 2)
        v = attention.v_proj(both).view(1, start + size, -1, config.head_dim).transpose(1, 2)
        if config.qk_norm:
            q, k = norm(attention.q_norm, q), norm(attention.k_norm, k)
        q = apply_rotary_pos_emb(q, q, cos[:, start:], sin[:, start:])[0]
        k = apply_rotary_pos_emb(k, k, cos, sin)[0]
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + attention.o_proj(mixed[0].transpose(0, 1).reshape(size, -1))
        b = norm(layer.post_attention_layernorm, x)
        mlp = layer.mlp
        x = x + mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(b)) * mlp.up_proj(b))
    return norm(model.norm, x)


def close(actual: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * max(scale, 1.0) * 4)


@FAMILIES
def test_a_block_is_what_the_definition_says(family: str) -> None:
    model = random_blocks(family=family)
    features = features_of(model, 11)
    close(one_shot(model, features, 5), by_definition(model, features, 5))


@FAMILIES
@INJECTION
def test_incremental_context_equals_one_shot(family: str, inject: bool) -> None:
    model = random_blocks(family=family, inject_previous_feature=inject)
    features = features_of(model, 300)  # past the first capacity: buffers grow on the way
    served = ServedBlocks(model, "fp32")
    context, end = served.new_context(), 0
    for count in (1, 7, 3, 200, 89):
        served.extend([context], features[end : end + count], NO_TOKENS, [count])
        end += count
        hidden = served.forward_step([context], torch.tensor([end % VOCAB]))[0]
        close(hidden, one_shot(model, features[:end], end % VOCAB))


@FAMILIES
@INJECTION
def test_training_blocks_equal_serving_blocks(family: str, inject: bool) -> None:
    model = random_blocks(family=family, inject_previous_feature=inject)
    features = features_of(model, 20)
    positions, anchors = torch.tensor([0, 1, 6, 20]), torch.tensor([7, 8, 9, 10])
    blocks = model.forward_blocks(features, positions, anchors)
    for block, position, anchor in zip(blocks, positions.tolist(), anchors.tolist(), strict=True):
        close(block, one_shot(model, features[:position], anchor))


def test_the_context_ends_strictly_before_the_anchor() -> None:
    model = random_blocks()
    features = features_of(model, 10)
    changed = features.clone()
    changed[6:] += 1.0
    at = torch.tensor([6]), torch.tensor([1])
    block = model.forward_blocks(features, *at)
    assert torch.equal(block, model.forward_blocks(changed, *at))
    changed[5] += 1.0
    assert not torch.allclose(block, model.forward_blocks(changed, *at))


def test_ragged_batch_equals_one_by_one() -> None:
    model = random_blocks(inject_previous_feature=True)
    lengths = (1, 40, 300, 7)
    all_features = [features_of(model, n, seed=n) for n in lengths]
    served = ServedBlocks(model, "fp32")
    contexts = [served.new_context() for _ in lengths]
    served.extend(contexts, torch.cat(all_features), NO_TOKENS, list(lengths))
    together = served.forward_step(contexts, torch.tensor([1, 2, 3, 4]))
    for row, features in enumerate(all_features):
        close(together[row], one_shot(model, features, row + 1))


def test_block_rows_vanish_after_the_step() -> None:
    model = random_blocks()
    features = features_of(model, 12)
    served = ServedBlocks(model, "fp32")
    context = served.new_context()
    served.extend([context], features[:10], NO_TOKENS, [10])
    for anchor in (1, 2, 3):
        served.forward_step([context], torch.tensor([anchor]))
    assert context.length == 10
    served.extend([context], features[10:], NO_TOKENS, [2])
    close(served.forward_step([context], torch.tensor([4]))[0], one_shot(model, features, 4))


def test_every_block_row_sees_the_whole_block() -> None:
    """No causal mask: with another anchor all rows change; with fewer masks row 0 does."""
    model = random_blocks()
    features = features_of(model, 5)
    whole = one_shot(model, features, 1)
    assert (one_shot(model, features, 2) - whole).abs().amax(-1).gt(1e-3).all()
    at = torch.tensor([5]), torch.tensor([1])
    assert not torch.allclose(model.forward_blocks(features, *at, block_size=2)[0, 0], whole[0])


def test_other_tapped_layers_change_the_output() -> None:
    model = random_blocks()
    states = torch.randn(4, 6, HIDDEN)  # one hidden state a target layer and token

    def block(layer_ids: tuple[int, ...]) -> Tensor:
        return one_shot(model, model.fuse(torch.cat([states[i] for i in layer_ids], -1)), 1)

    assert not torch.allclose(block((0, 2)), block((1, 3)), atol=1e-2)


def test_confidence_reads_the_previous_token_only_if_configured() -> None:
    hidden = torch.randn(2, HIDDEN)
    previous = torch.tensor([[1, 1], [2, 3]])
    for with_markov in (True, False):
        model = random_blocks(confidence_head_with_markov=with_markov)
        first, second = (model.confidence(hidden, row) for row in previous)
        assert torch.equal(first, second) is not with_markov


def test_without_an_anchor_that_predicts_the_block_is_one_row_longer() -> None:
    model = random_blocks(method="dflash", anchor_predicts=False)
    longer = random_blocks(method="dflash", block_size=5)
    longer.load_state_dict(model.state_dict())
    features = features_of(model, 6)
    block = one_shot(model, features, 2)
    assert block.shape == (4, HIDDEN)
    close(block, by_definition(longer, features, 2)[1:])


def test_wrong_target_tensors_are_refused() -> None:
    config = random_config()
    good, ids = torch.zeros(VOCAB, HIDDEN), torch.arange(50)
    with pytest.raises(DrafterError, match="hidden size 32"):
        new_drafter(config, good, torch.zeros(VOCAB, 16), ids)
    with pytest.raises(DrafterError, match="names 50 draft tokens"):
        new_drafter(config, good, good, ids[:-1])
    with pytest.raises(DrafterError, match="rise strictly"):
        new_drafter(config, good, good, ids.flip(0))
