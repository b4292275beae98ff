"""The DSpark drafter as it serves: blocks over each sequence's own context, and layers in fewer and
larger operations.

A draft of one request is as much launching as computing, as in `dspark.modeling.decoder`. The
weights, and what they compute, are those of `DSparkModel`, which trains.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.modeling.decoder import product, rotate
from dspark.modeling.drafters.context import DraftContext
from dspark.modeling.drafters.dspark import DSparkModel
from dspark.modeling.drafters.layers import Attend, DraftLayer, Rope, attend
from dspark.modeling.linear import Precision, RowFunction, activation_dtype, rms_norm


class ServedDrafter:
    """One block for each of several sequences, over their caches."""

    def __init__(self, model: DSparkModel, precision: Precision) -> None:
        """The model is taken over: its layers change to the precision's dtype."""
        self.config = model.config
        self._model = model.eval()
        self._dtype = activation_dtype(precision)  # of the layers; the heads stay in fp32
        model.layers.to(self._dtype)
        self._layers = [_ServedLayer(layer, precision) for layer in model.draft_layers]
        self._norm = _norm(model.norm)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """As `DSparkModel.confidence`."""
        return self._model.confidence(hidden, previous)

    def new_context(self) -> DraftContext:
        return DraftContext(self.config, self._dtype)

    @torch.inference_mode()
    def extend(self, contexts: Sequence[DraftContext], features: Tensor, counts: list[int]) -> None:
        """Append fused features to the sequences' contexts.

        features: [sum(counts), d]: ``counts[0]`` > 0 rows of ``contexts[0]``, and so on.
        """
        starts = [context.length for context in contexts]
        spans = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        rows = features.to(self._dtype)
        rope = _signed(self._model.rotary(torch.cat(spans), self._dtype))
        for context, count in zip(contexts, counts, strict=True):
            context.reserve(count)
        for index, layer in enumerate(self._layers):
            keys, values = layer.keys_values(rows, rope)
            parts = (torch.split(heads, counts, 1) for heads in (keys, values))
            for context, k, v in zip(contexts, *parts, strict=True):
                context.write(index, k, v)
        for context, part in zip(contexts, torch.split(features, counts), strict=True):
            context.length += len(part)
            context.last_feature = part[-1].clone()

    @torch.inference_mode()
    def forward_step(self, contexts: Sequence[DraftContext], anchor_tokens: Tensor) -> Tensor:
        """Hidden states of one block after each context; the contexts stay as they are.

        anchor_tokens: [R] int64; the anchor of r stands at position ``contexts[r].length``.
        Returns [R, block_size, d].
        """
        size = self.config.block_size
        before_anchor = torch.stack([context.last_feature for context in contexts])
        rows = self._model.block_inputs(anchor_tokens, before_anchor, size).to(self._dtype)
        positions = torch.tensor([context.length for context in contexts])
        rope = _signed(self._model.block_rope(positions, size, self._dtype))
        for context in contexts:
            context.reserve(size)
        for index, layer in enumerate(self._layers):

            def attend_rows(q: Tensor, k: Tensor, v: Tensor, index: int = index) -> Tensor:
                parts = (torch.split(heads, size, 1) for heads in (q, k, v))
                blocks = zip(contexts, *parts, strict=True)
                return torch.cat([attend(q, *c.write(index, k, v)) for c, q, k, v in blocks])

            rows = layer(rows, rope, attend_rows)
        return self._norm(rows.float()).view(len(contexts), size, -1)


class _ServedLayer:
    """`DraftLayer` over fused weights."""

    def __init__(self, layer: DraftLayer, precision: Precision) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._head_dim = attention.head_dim
        self._num_queries = attention.q_proj.out_features // attention.head_dim
        self._num_keys = attention.k_proj.out_features // attention.head_dim
        self._attention_norm = _norm(layer.input_layernorm)
        self._qkv = product((attention.q_proj, attention.k_proj, attention.v_proj), precision)
        self._kv = product((attention.k_proj, attention.v_proj), precision)
        self._head_norms = _head_norm(attention.q_norm), _head_norm(attention.k_norm)
        self._out = product((attention.o_proj,), precision)
        self._mlp_norm = _norm(layer.post_attention_layernorm)
        self._gate_up = product((mlp.gate_proj, mlp.up_proj), precision)
        self._down = product((mlp.down_proj,), precision)

    def keys_values(self, features: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """features: [N, d]; rope: `_signed`. Returns two [KVH, N, hd]."""
        heads = self._heads(self._kv(features))
        keys, (_, of_keys) = heads[:, : self._num_keys], self._head_norms
        rotate(keys if of_keys is None else of_keys(keys), *rope, out=keys)
        heads = heads.transpose(0, 1)
        return heads[: self._num_keys], heads[self._num_keys :]

    def __call__(self, rows: Tensor, rope: Rope, attend_rows: Attend) -> Tensor:
        """rows: [N, d], the rows of any number of blocks; rope: `_signed`. Returns [N, d]."""
        heads = self._heads(self._qkv(self._attention_norm(rows)))
        first_value = self._num_queries + self._num_keys
        turning = turned = heads[:, :first_value]
        of_queries, of_keys = self._head_norms
        if of_queries is not None and of_keys is not None:
            queries, keys = turning[:, : self._num_queries], turning[:, self._num_queries :]
            turned = torch.cat((of_queries(queries), of_keys(keys)), dim=1)
        rotate(turned, *rope, out=turning)
        heads = heads.transpose(0, 1)
        mixed = attend_rows(
            heads[: self._num_queries],
            heads[self._num_queries : first_value],
            heads[first_value:],
        )
        rows = rows + self._out(mixed)
        gate, up = self._gate_up(self._mlp_norm(rows)).chunk(2, dim=-1)
        return rows + self._down(torch.nn.functional.silu(gate).mul_(up))

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, self._head_dim)


def _signed(rope: Rope) -> Rope:
    """cos and sin [N, hd] as `rotate` takes them: [N, 1, hd], the sine with its sign."""
    cos, sin = (each.unsqueeze(1) for each in rope)
    first, second = sin.chunk(2, dim=-1)
    return cos, torch.cat((-first, second), dim=-1)


def _norm(module: torch.nn.RMSNorm) -> RowFunction:
    assert module.eps is not None
    return rms_norm(module.weight, module.eps)


def _head_norm(module: torch.nn.Module) -> RowFunction | None:
    """None where the family norms no heads."""
    return _norm(module) if isinstance(module, torch.nn.RMSNorm) else None
