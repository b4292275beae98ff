"""The DSpark drafter as it serves: blocks over each sequence's own context, through fused layers.

The weights, and what they compute, are those of `DSparkModel`, which trains.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.modeling.drafters.context import DraftContext
from dspark.modeling.drafters.dspark import DSparkModel
from dspark.modeling.drafters.layers import DraftLayer
from dspark.modeling.fused import (
    FusedLayer,
    SignedRope,
    norm_function,
    product,
    rotate,
    signed_rope,
)
from dspark.modeling.linear import Precision, activation_dtype


class ServedDrafter:
    """One block for each of several sequences, over their caches."""

    def __init__(self, model: DSparkModel, precision: Precision) -> None:
        """The model is taken over: its layers change to the precision's dtype."""
        self.config = model.config
        self._model = model.eval()
        self._dtype = activation_dtype(precision)  # of the layers; the heads stay in fp32
        model.layers.to(self._dtype)
        self._layers = [_ServedLayer(layer, precision) for layer in model.draft_layers]
        self._norm = norm_function(model.norm)

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
        rope = signed_rope(*self._model.rotary(torch.cat(spans), self._dtype))
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
        rope = signed_rope(*self._model.block_rope(positions, size, self._dtype))
        for context in contexts:
            context.reserve(size)
        for index, layer in enumerate(self._layers):

            def attend_rows(queries: Tensor, keys_values: Tensor, index: int = index) -> Tensor:
                heads = queries.transpose(0, 1), *_by_head(keys_values)
                parts = (torch.split(each, size, 1) for each in heads)
                blocks = zip(contexts, *parts, strict=True)
                return torch.cat([_attend(q, *c.write(index, k, v)) for c, q, k, v in blocks])

            rows = layer(rows, rope, attend_rows)
        return self._norm(rows.float()).view(len(contexts), size, -1)


class _ServedLayer(FusedLayer):
    """`DraftLayer` over fused weights, for block rows and for the context's features."""

    def __init__(self, layer: DraftLayer, precision: Precision) -> None:
        super().__init__(layer, precision, torch.nn.functional.silu)
        self._kv = product((layer.self_attn.k_proj, layer.self_attn.v_proj), precision)

    def keys_values(self, features: Tensor, rope: SignedRope) -> tuple[Tensor, ...]:
        """features: [N, d], fused. Returns two [KVH, N, hd]."""
        heads = self._kv(features).view(len(features), -1, self._head_dim)
        keys = heads[:, : self._num_keys]
        rotate(keys if self._key_norm is None else self._key_norm(keys), *rope, out=keys)
        return _by_head(heads)


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One sequence's block rows to all its keys. queries: [H, N, hd]; keys, values: [KVH, L, hd].
    Returns [N, H * hd].

    Not by matrix products, although they are as exact: L grows with every step, and oneDNN compiles
    a bf16 product anew for each shape, which takes longer than the layer.
    """
    num_heads, num_rows, head_dim = queries.shape
    rows = queries.reshape(1, len(keys), -1, head_dim)  # that share a key-value head: one product
    mixed = torch.nn.functional.scaled_dot_product_attention(rows, keys[None], values[None])
    return mixed.view(num_heads, num_rows, head_dim).transpose(0, 1).reshape(num_rows, -1)


def _by_head(keys_values: Tensor) -> tuple[Tensor, ...]:
    """[N, 2*KVH, hd], keys before values -> two [KVH, N, hd]."""
    return keys_values.transpose(0, 1).chunk(2)
