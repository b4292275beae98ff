import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dspark.core.errors import ConfigError
from dspark.modeling.linear import (
    Fp16WeightLinear,
    apply_precision,
    has_packed_bf16,
    linear_function,
    packed_bf16,
    padded_rows,
    resolve_precision,
    rms_norm,
)

needs_fbgemm = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="no FBGEMM here"
)


def test_unknown_precision_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="auto, fp32, bf16, fp16w"):
        resolve_precision("int3")


def test_padding_takes_few_rows_more_and_leaves_few_counts() -> None:
    counts = range(1, 513)
    assert all(rows <= padded_rows(rows) < rows + 16 for rows in counts)
    assert all(padded_rows(rows) == rows for rows in range(1, 17))  # a lone user's steps
    assert len({padded_rows(rows) for rows in counts}) < 50


def test_auto_is_one_of_the_precisions() -> None:
    assert resolve_precision("auto") in ("fp32", "bf16", "fp16w")
    assert resolve_precision("fp32") == "fp32"


@needs_fbgemm
@pytest.mark.parametrize("has_bias", [False, True])
def test_fp16_weights_are_rounded_once_and_sums_stay_fp32(has_bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=has_bias)
    x = torch.randn(5, 96)
    rounded = linear.weight.half().double()
    expected = x.double() @ rounded.T + (linear.bias.double() if has_bias else 0)
    with torch.no_grad():
        got = Fp16WeightLinear(linear.weight, linear.bias)(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


@needs_fbgemm
def test_fp16_rows_depend_on_the_batch_only_by_fp32_rounding() -> None:
    """What makes this precision as good as fp32 for speculation: sums differ in the order of their
    terms and nothing else. (They do differ: kernels for 1 and 2 rows add up in another order.)"""
    torch.manual_seed(0)
    packed = Fp16WeightLinear(torch.randn(192, 64))
    x = torch.randn(130, 64)
    whole = packed(x)
    for size in (1, 2, 3, 5, 8, 13, 32, 64, 129):
        for start in range(0, len(x) - size + 1, 17):
            part = packed(x[start : start + size])
            assert (part - whole[start : start + size]).abs().max() < 64 * 2**-20


@needs_fbgemm
def test_a_linear_function_is_the_module_it_was_made_of() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(24, 16), torch.randn(3, 24)
    for precision, tolerance in (("fp32", 1e-6), ("fp16w", 5e-3)):
        for bias in (linear.bias, None):
            expected = nn.functional.linear(x, linear.weight, bias)
            got = linear_function(linear.weight, bias, precision)(x)
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


@pytest.mark.skipif(not has_packed_bf16(), reason="no packed bf16 products on this CPU")
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_bf16_products_are_sums_in_fp32_rounded_once(has_bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(576, 40, bias=has_bias).bfloat16()
    product = packed_bf16(linear.weight, linear.bias)
    with torch.no_grad():
        for rows in (1, 3, 16, 70):
            x = torch.randn(rows, 576).bfloat16()
            exact = x.double() @ linear.weight.double().T + (
                linear.bias.double() if has_bias else 0
            )
            got = product(x)
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_norm_equals_the_transformers_module(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 7, 64).to(dtype) * 5
    norm = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.data.uniform_(0.5, 2)
    got = rms_norm(norm.weight, 1e-5)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, norm(x))


def test_small_rows_are_scaled_by_eps_and_not_by_their_norm() -> None:
    got = rms_norm(torch.ones(4), 1e-2)(torch.full((1, 4), 1e-4))
    torch.testing.assert_close(got, torch.full((1, 4), 1e-3))


@needs_fbgemm
def test_apply_precision_swaps_every_linear() -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaModel(config)
    expected = model(torch.arange(5)[None]).last_hidden_state
    apply_precision(model, "fp16w")
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(Fp16WeightLinear) == 14
    assert nn.Linear not in kinds
    got = model(torch.arange(5)[None]).last_hidden_state
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=0)
