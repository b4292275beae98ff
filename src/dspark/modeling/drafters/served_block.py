"""The drafters that work in parallel, as they serve: one pass for the blocks of all sequences."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.modeling.drafters.block import BlockDrafter
from dspark.modeling.drafters.context import DraftContext
from dspark.modeling.drafters.dflash2 import DFlash2Layer, filtered
from dspark.modeling.drafters.interface import OpenBlocks
from dspark.modeling.drafters.layers import DraftLayer, in_window
from dspark.modeling.drafters.served_attention import attend_context, by_head
from dspark.modeling.fused import (
    AttendRows,
    FusedLayer,
    SignedRope,
    norm_function,
    product,
    rotate,
    signed_rope,
)
from dspark.modeling.linear import Precision, activation_dtype


class ServedBlocks:
    """One block for each of several sequences, over their caches."""

    def __init__(self, model: BlockDrafter, precision: Precision) -> None:
        self._model = model.eval()
        self._dtype = activation_dtype(precision)  # of the layers; the heads stay in fp32
        self._size = model.config.block_rows
        model.layers.to(self._dtype)
        self._layers = [
            _ConvolvedLayer(layer, precision, self._size)
            if isinstance(layer, DFlash2Layer)
            else _ServedLayer(layer, precision)
            for layer in model.draft_layers
        ]
        self._norm = norm_function(model.norm)

    def new_context(self) -> DraftContext:
        return DraftContext(self._model.config, self._dtype)

    @torch.inference_mode()
    def extend(
        self, contexts: Sequence[DraftContext], features: Tensor, tokens: Tensor, counts: list[int]
    ) -> None:
        """As `ServedDrafter.extend`; the tokens are in the features."""
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
            context.last = part[-1].clone()

    def open_blocks(self, contexts: Sequence[DraftContext]) -> OpenBlocks:
        return _Opened(self, contexts)

    @torch.inference_mode()
    def forward_step(self, contexts: Sequence[DraftContext], anchor_tokens: Tensor) -> Tensor:
        """Hidden states of one block after each context. anchor_tokens: [R] int64. Returns
        [R, block_size, d]."""
        size = self._size
        before_anchor = torch.stack([context.last for context in contexts])
        rows = self._model.block_inputs(anchor_tokens, before_anchor, size).to(self._dtype)
        positions = torch.tensor([context.length for context in contexts])
        rope = signed_rope(*self._model.block_rope(positions, size, self._dtype))
        for context in contexts:
            context.reserve(size)
        for index, layer in enumerate(self._layers):

            def attend_rows(queries: Tensor, keys_values: Tensor, index: int = index) -> Tensor:
                heads = queries.transpose(0, 1), *by_head(keys_values)
                parts = (torch.split(each, size, 1) for each in heads)
                blocks = zip(contexts, *parts, strict=True)
                mixed = []
                for context, q, k, v in blocks:
                    keys, values = context.write(index, k, v)
                    seen = self._seen(index, context.length)
                    mixed.append(attend_context(q, keys, values, seen))
                return torch.cat(mixed)

            rows = layer(rows, rope, attend_rows)
        return self._model.drafting_rows(self._norm(rows.float()).view(len(contexts), size, -1))

    def _seen(self, layer: int, length: int) -> Tensor | None:
        """[size, length + size] bool: what the rows of a block after so many positions see in a
        layer; None, where that is everything."""
        config, size = self._model.config, self._size
        window = config.windows[layer]
        if not window or (length + size <= window and not config.causal_windows):
            return None
        keys = torch.arange(length + size)
        return in_window(keys[length:], keys, window, config.causal_windows)


class _Opened:
    def __init__(self, drafter: ServedBlocks, contexts: Sequence[DraftContext]) -> None:
        self._drafter, self._contexts = drafter, contexts

    def rows(self, previous: Tensor) -> Tensor:
        return self._drafter.forward_step(self._contexts, previous)


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
        return by_head(heads)


class _ConvolvedLayer(_ServedLayer):
    """`DFlash2Layer` in the same way."""

    def __init__(self, layer: DFlash2Layer, precision: Precision, size: int) -> None:
        super().__init__(layer, precision)
        self._convolutions = layer.attention_conv, layer.mlp_conv
        self._size = size

    def __call__(self, rows: Tensor, rope: SignedRope, attend: AttendRows) -> Tensor:
        for_attention, for_mlp = self._convolutions
        normed = self.attention_norm(rows)
        before, after = for_attention.kernels(normed).unbind(1)
        mixed = self.attention(filtered(normed, before, self._size), rope, attend)
        rows = rows + filtered(mixed, after, self._size)
        normed = self.mlp_norm(rows)
        before, after = for_mlp.kernels(normed).unbind(1)
        return rows + filtered(self.mlp(filtered(normed, before, self._size)), after, self._size)
