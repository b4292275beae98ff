"""Fused features of processed tokens: made once, kept beside the KV, handed out as wire bytes."""

from torch import Tensor

from dspark.modeling.drafters.shared import SharedDraftParts
from dspark.modeling.kv import KVCache


class FeatureStore:
    """The KV cache's side tensor, filled through the drafter's own fusion.

    Rows live in cache slots, so whatever shares, frees or evicts a block does it to its features.
    """

    def __init__(self, shared: SharedDraftParts, kv: KVCache) -> None:
        assert kv.features is not None, "the KV cache was built without room for features"
        self._shared = shared
        self._rows = kv.features.flatten(0, 1)  # [slots, d], a view

    def write(self, slots: Tensor, taps: Tensor) -> None:
        """slots: [N]; taps: [N, n*d], the tapped hidden states of the same tokens."""
        fused = self._shared.fuse(taps).to(self._shared.wire_dtype)  # what the drafter will see
        self._rows.index_copy_(0, slots.to(self._rows.device), fused.to(self._rows))

    def read(self, slots: Tensor) -> bytes:
        """Rows of [N] slots in the wire dtype, N * d values."""
        return self._shared.pack(self._rows.index_select(0, slots.to(self._rows.device)))
