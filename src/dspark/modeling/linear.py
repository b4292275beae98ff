"""Precisions a target can be computed in, and the products and norms that make them fast on a
CPU."""

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from dspark.core.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16w"]
"""``fp32``: the exactness reference. ``bf16``: weights and activations in bf16, for devices that
multiply it natively. ``fp16w``: fp16 weights, fp32 activations and accumulation (FBGEMM), for
x86 CPUs without bf16."""


RowFunction: TypeAlias = Callable[[Tensor], Tensor]
"""[..., in] -> [..., out]. A plain function: at one row, calling a module costs as much as a small
operation."""


def resolve_precision(name: str, device: torch.device | None = None) -> Precision:
    """Turn a setting into a precision; ``auto`` takes the fastest that the device (the CPU, if not
    given) computes well."""
    if name != "auto":
        if name not in get_args(Precision):
            choices = ", ".join(("auto", *get_args(Precision)))
            raise ConfigError(f"unknown precision {name!r}; choose one of {choices}")
        if name == "fp16w" and device is not None and device.type != "cpu":
            raise ConfigError(f"precision fp16w is for CPUs; on {device} choose fp32 or bf16")
        return cast(Precision, name)
    if device is not None and device.type != "cpu":
        return "bf16"
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"):
        return "bf16"
    return "fp16w" if "fbgemm" in torch.backends.quantized.supported_engines else "fp32"


def activation_dtype(precision: Precision) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


class Fp16WeightLinear(nn.Module):
    """``x @ W.T + b`` with W packed in fp16 for FBGEMM; inputs, sums and outputs stay fp32.

    As in fp32, the order of a row's sum depends a little on how many rows are computed with it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [out, in]; it is copied, so the caller may free it."""
        super().__init__()
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise ConfigError("precision fp16w needs an x86 build of torch with FBGEMM; use fp32")
        torch.backends.quantized.engine = "fbgemm"
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float(), bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, torch.ops.quantized.linear_dynamic_fp16.default(x, self._packed))


def linear_function(weight: Tensor, bias: Tensor | None, precision: Precision) -> RowFunction:
    """``x @ W.T + b``. weight: [out, in], already in the precision's activation dtype."""
    if precision == "fp16w":
        return Fp16WeightLinear(weight, bias).forward
    if packs_bf16(precision, weight.device):
        return packed_bf16(weight, bias)
    return partial(nn.functional.linear, weight=weight, bias=bias)


_TILE = 16  # rows of a tile of the matrix units


def padded_rows(rows: int) -> int:
    """So many rows cost `packed_bf16` no more than ``rows`` do, and are one of few counts.

    oneDNN builds a kernel for every count it has not met lately, which takes as long as computing
    half a step; batches of all sizes would make it do so in most steps.
    """
    return rows if rows <= _TILE else -(-rows // _TILE) * _TILE


def packs_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether products of this precision are `packed_bf16` on this device."""
    return precision == "bf16" and device.type == "cpu" and has_packed_bf16()


def has_packed_bf16() -> bool:
    """Whether this build and this CPU can do `packed_bf16`."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_bf16(weight: Tensor, bias: Tensor | None) -> RowFunction:
    """A bf16 product whose weight lies as oneDNN's kernels read it, instead of being rearranged in
    every call. The two operations are those that torch's own compiler emits for a linear.

    Many rows are padded (`padded_rows`); a caller of many products does that once for all.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    product = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: Tensor) -> Tensor:
        rows = len(x)
        missing = padded_rows(rows) - rows
        if missing:
            x = nn.functional.pad(x, (0, 0, 0, missing))
        y = cast(Tensor, product(x, packed, bias, "none", [], ""))
        return y[:rows] if missing else y

    return linear


def rms_norm(weight: Tensor, eps: float) -> RowFunction:
    """The RMS norm of transformers in fewer kernels, fp32 inside. weight: [d]."""
    weight = weight.detach()
    epsilon = torch.tensor(eps, device=weight.device)
    share = 1 / len(weight)

    def norm(x: Tensor) -> Tensor:
        rows = x.float()
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        scale = torch.addcmul(epsilon, length, length, value=share).rsqrt_()
        return (rows * scale).to(x.dtype).mul_(weight)

    return norm


def apply_precision(model: nn.Module, precision: Precision) -> None:
    """Swap the linears of a model, in place, for the precision's own."""
    model.to(activation_dtype(precision))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if precision == "fp16w" and isinstance(child, nn.Linear):
                setattr(parent, name, Fp16WeightLinear(child.weight, child.bias))
