"""What the drafters that draft token by token have in common: one causal layer over pairs of a
target feature and the token after it.

Pair i is (feature of position i, token i + 1), stands at position i and predicts token i + 2. The
last pair before a block holds the anchor and gives the first draft; from then on the layer's own
output takes the place of the feature that the target has not computed yet. Pairs of a draft see all
the true pairs before it and the draft's own, and are forgotten after it.
"""

from abc import abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.interface import Drafter, OpenBlocks
from dspark.modeling.drafters.layers import Attend, DraftLayer, Rope, attend


class ChainLayer(DraftLayer):
    """A draft layer that starts from two rows."""

    @abstractmethod
    def join(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of pairs [N, d] each: what attention reads [N, in width], and what its output is added
        to [N, d]."""

    def forward_pairs(
        self, embedded: Tensor, hidden: Tensor, rope: Rope, attend_rows: Attend
    ) -> Tensor:
        """Tokens' embeddings and features, or earlier outputs, [N, d] each. Returns [N, d]."""
        normed, rows = self.join(embedded, hidden)
        rows = rows + self.attention(normed, rope, attend_rows)
        return cast(Tensor, rows + self.mlp(self.post_attention_layernorm(rows)))


class ChainDrafter(Drafter):
    layer_class: type[ChainLayer]

    def add_layers(self, config: DrafterConfig) -> None:
        self.layers = nn.ModuleList([self.layer_class(config)])

    @property
    def layer(self) -> ChainLayer:
        return cast(ChainLayer, self.layers[0])

    def open_blocks(
        self, features: Tensor, tokens: Tensor, positions: Tensor, block_size: int
    ) -> OpenBlocks:
        return _Chains(self, features, tokens, positions)


class _Chains:
    """Chains after A anchors of one sequence."""

    def __init__(
        self, drafter: ChainDrafter, features: Tensor, tokens: Tensor, positions: Tensor
    ) -> None:
        self._drafter, self._positions, self._steps = drafter, positions, 0
        pair = torch.arange(len(features), device=features.device)
        self._visible = pair < positions[:, None]  # [A, keys]
        self._keys: list[Tensor] = []  # [KVH, n, hd] each
        self._values: list[Tensor] = []
        causal = pair <= pair[:, None]
        outputs = self._forward(tokens[1 : len(features) + 1], features, pair, causal)
        # An anchor without a past has no pair; its chain starts from nothing.
        self._last = outputs[(positions - 1).clamp(min=0)].where(positions[:, None] > 0, 0.0)

    def rows(self, previous: Tensor) -> Tensor:
        if self._steps:
            own = torch.eye(len(previous), dtype=torch.bool, device=previous.device)
            self._visible = torch.cat((self._visible, own), 1)
            at = (self._positions - 1 + self._steps).clamp(min=0)
            self._last = self._forward(previous, self._last, at, self._visible)
        self._steps += 1
        return cast(Tensor, self._drafter.norm(self._last))[:, None]

    def _forward(self, tokens: Tensor, hidden: Tensor, at: Tensor, visible: Tensor) -> Tensor:
        """[N] tokens, [N, d] rows, at positions [N], which see ``visible`` [N, all keys]."""

        def attend_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys.append(k)
            self._values.append(v)
            return attend(q, torch.cat(self._keys, 1), torch.cat(self._values, 1), visible)

        drafter = self._drafter
        rope = cast(Rope, drafter.rotary(at, hidden.dtype))
        return drafter.layer.forward_pairs(drafter.embedding[tokens], hidden, rope, attend_rows)
