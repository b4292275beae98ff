"""Precisions a target can be computed in, and the module swaps that make them fast on a CPU."""

from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dspark.core.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16w"]
"""``fp32``: the exactness reference. ``bf16``: weights and activations in bf16, for devices that
multiply it natively. ``fp16w``: fp16 weights, fp32 activations and accumulation (FBGEMM), for
x86 CPUs without bf16."""


def resolve_precision(name: str) -> Precision:
    """Turn a setting into a precision; ``auto`` takes the fastest this machine computes well."""
    if name != "auto":
        if name not in get_args(Precision):
            choices = ", ".join(("auto", *get_args(Precision)))
            raise ConfigError(f"unknown precision {name!r}; choose one of {choices}")
        return cast(Precision, name)
    if torch.cuda.is_available():
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
        return cast(Tensor, torch.ops.quantized.linear_dynamic_fp16(x, self._packed))


class FastRMSNorm(nn.Module):
    """The RMS norm of the transformers module in fewer kernels; the same weights, fp32 inside.

    At one row a norm costs what its kernel launches cost, and a step has two for each layer.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._eps = torch.tensor(eps, device=weight.device)  # no buffer: it must stay fp32

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (rows * scale).to(x.dtype).mul_(self.weight)


def apply_precision(model: nn.Module, precision: Precision) -> None:
    """Swap the linears and norms of a transformers model, in place, for the precision's own."""
    model.to(activation_dtype(precision))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if precision == "fp16w" and isinstance(child, nn.Linear):
                setattr(parent, name, Fp16WeightLinear(child.weight, child.bias))
            elif isinstance(child, LlamaRMSNorm | Qwen3RMSNorm):
                setattr(parent, name, FastRMSNorm(child.weight, child.variance_epsilon))
