import torch
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dspark.modeling.fused import FusedMLP, rotate


def test_rotation_is_the_one_of_transformers() -> None:
    torch.manual_seed(0)
    heads, angles = torch.randn(5, 3, 8), torch.rand(5, 4) * 6
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
    expected, _ = apply_rotary_pos_emb(heads, heads, cos, sin)
    first, second = sin.chunk(2, dim=-1)
    signed = torch.cat((-first, second), dim=-1)
    rotate(heads, cos[:, None], signed[:, None], out=heads)
    torch.testing.assert_close(heads, expected)


class Projections(nn.Module):
    """The parts of a transformers MLP, with biases, which the shipped target does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 10), nn.Linear(6, 10)
        self.down_proj, self.act_fn = nn.Linear(10, 6), nn.SiLU()


def test_gate_and_up_are_one_product_with_their_biases() -> None:
    torch.manual_seed(0)
    mlp, x = Projections(), torch.randn(4, 6)
    expected = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    with torch.inference_mode():
        torch.testing.assert_close(FusedMLP(mlp)(x), expected)
