"""The drafters that work token by token, as they serve: each step of all chains is one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.modeling.drafters.chain import ChainDrafter
from dspark.modeling.drafters.context import DraftContext
from dspark.modeling.drafters.interface import OpenBlocks
from dspark.modeling.drafters.served_attention import attend_context, by_head
from dspark.modeling.fused import FusedLayer, norm_function, signed_rope
from dspark.modeling.linear import Precision, activation_dtype


class ServedChains:
    """Chains after each of several sequences, over their caches."""

    def __init__(self, model: ChainDrafter, precision: Precision) -> None:
        self._model = model.eval()
        self._dtype = activation_dtype(precision)  # of the layer; the heads stay in fp32
        model.layers.to(self._dtype)
        self._layer = FusedLayer(model.layer, precision, torch.nn.functional.silu)
        self._norm = norm_function(model.norm)

    def new_context(self) -> DraftContext:
        return DraftContext(self._model.config, self._dtype)

    @torch.inference_mode()
    def extend(
        self, contexts: Sequence[DraftContext], features: Tensor, tokens: Tensor, counts: list[int]
    ) -> None:
        """As `ServedDrafter.extend`."""
        for context, count in zip(contexts, counts, strict=True):
            context.reserve(count)
        spans = [
            torch.arange(c.length, c.length + n) for c, n in zip(contexts, counts, strict=True)
        ]
        rows = self.forward(contexts, tokens, features, torch.cat(spans), counts)
        for context, part in zip(contexts, torch.split(rows, counts), strict=True):
            context.length += len(part)
            context.last = part[-1].float()

    def open_blocks(self, contexts: Sequence[DraftContext]) -> OpenBlocks:
        for context in contexts:
            context.reserve(self._model.config.block_size)
        return _Opened(self, contexts)

    @torch.inference_mode()
    def forward(
        self,
        contexts: Sequence[DraftContext],
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        counts: list[int],
        after: int = 0,
    ) -> Tensor:
        """Pairs (tokens [N], hidden [N, d]) at positions [N], ``counts`` of each context, through
        the layer. They see the context, ``after`` pairs of the same chain behind it, and those of
        their own up to themselves. Returns [N, d]."""

        def attend_rows(queries: Tensor, keys_values: Tensor) -> Tensor:
            heads = queries.transpose(0, 1), *by_head(keys_values)
            parts = zip(contexts, *(torch.split(each, counts, 1) for each in heads), strict=True)
            return torch.cat(
                [_attend_causally(q, *c.write(0, k, v, after)) for c, q, k, v in parts]
            )

        embedded = self._model.embedding[tokens].to(self._dtype)
        normed, rows = self._model.layer.join(embedded, hidden.to(self._dtype))
        rope = signed_rope(*self._model.rotary(positions, self._dtype))
        rows = rows + self._layer.attention(normed, rope, attend_rows)
        return rows + self._layer.mlp(self._layer.mlp_norm(rows))

    def head_rows(self, hidden: Tensor) -> Tensor:
        """What the head reads of outputs [N, d]: one position of N blocks, [N, 1, d]."""
        return self._norm(hidden.float())[:, None]


class _Opened:
    def __init__(self, drafter: ServedChains, contexts: Sequence[DraftContext]) -> None:
        self._drafter, self._contexts, self._steps = drafter, contexts, 0
        self._last = torch.stack([context.last for context in contexts])

    def rows(self, previous: Tensor) -> Tensor:
        if self._steps:  # the pair of the anchor is in the context already
            after = self._steps - 1
            positions = torch.tensor([max(c.length + after, 0) for c in self._contexts])
            counts = [1] * len(self._contexts)
            self._last = self._drafter.forward(
                self._contexts, previous, self._last, positions, counts, after
            )
        self._steps += 1
        return self._drafter.head_rows(self._last)


def _attend_causally(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last rows of a sequence to those up to themselves. Shapes as `attend_context`."""
    num_rows, length = queries.shape[1], keys.shape[1]
    visible = None
    if num_rows > 1:
        visible = torch.ones(num_rows, length, dtype=torch.bool).tril(length - num_rows)
    return attend_context(queries, keys, values, visible)
