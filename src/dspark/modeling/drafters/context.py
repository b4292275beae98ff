"""One sequence's injected keys and values, for serving."""

import torch
from torch import Tensor

from dspark.modeling.drafters.config import DrafterConfig

_FIRST_CAPACITY = 256


class DraftContext:
    """Keys and values of the ``length`` positions before a sequence's anchor, every layer.

    Buffers are [KVH, capacity, hd] and double as they fill. Rows past ``length`` are scratch: a
    block's own keys lie there during its forward and mean nothing afterwards.
    """

    def __init__(self, config: DrafterConfig, dtype: torch.dtype = torch.float32) -> None:
        size = (config.num_key_value_heads, _FIRST_CAPACITY, config.head_dim)
        self.length = 0
        # What the next block takes from position length - 1: the feature, or a chain's last output.
        self.last = torch.zeros(config.hidden_size)
        self._keys = [torch.empty(size, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self._values = [torch.empty_like(keys) for keys in self._keys]

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows after ``length``; what is stored is kept."""
        capacity = self._keys[0].shape[1]
        if self.length + rows <= capacity:
            return
        while capacity < self.length + rows:
            capacity *= 2
        self._keys = [self._grown(buffer, capacity) for buffer in self._keys]
        self._values = [self._grown(buffer, capacity) for buffer in self._values]

    def write(
        self, layer: int, keys: Tensor, values: Tensor, after: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Put rows ``after`` scratch rows behind the stored ones, without moving ``length``. keys,
        values: [KVH, n, hd].

        Returns the layer's keys and values up to and with those rows: two
        [KVH, length + after + n, hd] views.
        """
        start = self.length + after
        end = start + keys.shape[1]
        self._keys[layer][:, start:end] = keys
        self._values[layer][:, start:end] = values
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def _grown(self, buffer: Tensor, capacity: int) -> Tensor:
        grown = buffer.new_empty(buffer.shape[0], capacity, buffer.shape[2])
        grown[:, : self.length] = buffer[:, : self.length]
        return grown
