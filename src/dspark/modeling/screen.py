"""The argmax of fp32 logits at the price of bf16 ones.

A CPU that multiplies bf16 natively takes a tenth of the time for a product of many rows with a
large head, but gives it in bf16, where the largest of 50,000 logits is often not alone. So the
bf16 product only screens: every token whose logit could be the largest, given the largest error
that rounding can make, is computed again in fp32, and these few decide.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.modeling.linear import packed_bf16

_BLOCK = 64  # tokens whose largest logit is looked at first
_ROUNDING = 2.0**-8  # largest relative error of rounding to bf16; fp16, and fp32 sums, add little
_SLACK = 1.25


class ArgmaxScreen:
    """Finds the argmax of ``hidden @ weight.T``, weight rounded to fp16 and sums in fp32."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [V, d] fp32; it is kept, and packed copies of it are made."""
        self._weight = weight
        self._largest_norm = float(torch.linalg.vector_norm(weight, dim=1).max())
        padding = weight[-1:].expand(-len(weight) % _BLOCK, -1)  # never above a real token
        self._product = packed_bf16(torch.cat((weight, padding)).bfloat16(), None)

    def argmax(self, hidden: Tensor) -> NDArray[np.int64]:
        """hidden: [N, d]; of equal logits the lowest token. Returns [N]."""
        rows, tokens = self._candidates(hidden.bfloat16())
        weights = self._weight.index_select(0, tokens).half().float()
        logits = (weights * hidden.float().index_select(0, rows)).sum(-1)
        worst_first = np.lexsort((-tokens.numpy(), logits.numpy()))
        best = np.zeros(len(hidden), np.int64)
        best[rows.numpy()[worst_first]] = tokens.numpy()[worst_first]  # the last one stays
        return best

    def _candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and tokens [C] of all logits that could be their row's largest.

        A logit is off by at most ``2^-8 (|x||w| + |logit|)``: once for the weights, by
        Cauchy-Schwarz, and once for the result. So twice that below the largest nothing can hide.
        """
        logits = self._product(hidden).view(len(hidden), -1, _BLOCK)
        peaks = logits.amax(-1).float()
        largest = peaks.amax(-1)
        norms = torch.linalg.vector_norm(hidden.float(), dim=1)
        error = _SLACK * _ROUNDING * (norms * self._largest_norm + largest.abs())
        least = largest - 2 * error
        rows, blocks = (peaks >= least[:, None]).nonzero(as_tuple=True)
        near, inside = (logits[rows, blocks].float() >= least[rows, None]).nonzero(as_tuple=True)
        rows, tokens = rows[near], blocks[near] * _BLOCK + inside
        real = tokens < len(self._weight)
        return rows[real], tokens[real]
