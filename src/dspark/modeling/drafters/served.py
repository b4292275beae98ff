"""A drafter as it serves: over each sequence's own context, through fused layers.

The weights, and what they compute, are those of the drafter that trains; tests hold the two
together.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dspark.modeling.drafters.block import BlockDrafter
from dspark.modeling.drafters.chain import ChainDrafter
from dspark.modeling.drafters.context import DraftContext
from dspark.modeling.drafters.interface import Drafter, OpenBlocks
from dspark.modeling.drafters.served_block import ServedBlocks
from dspark.modeling.drafters.served_chain import ServedChains
from dspark.modeling.linear import Precision


class ServedDrafter(Protocol):
    def new_context(self) -> DraftContext: ...

    def extend(
        self, contexts: Sequence[DraftContext], features: Tensor, tokens: Tensor, counts: list[int]
    ) -> None:
        """Append to the sequences' contexts.

        features: [sum(counts), d] fused, tokens: [sum(counts)] the ids one place after each;
        ``counts[0]`` > 0 rows of ``contexts[0]``, and so on.
        """
        ...

    def open_blocks(self, contexts: Sequence[DraftContext]) -> OpenBlocks:
        """Begin a block after each context, whose ``length`` is the anchor's position; the contexts
        stay as they are."""
        ...


def serve(drafter: Drafter, precision: Precision) -> ServedDrafter:
    """The drafter is taken over: its layers change to the precision's dtype."""
    if isinstance(drafter, BlockDrafter):
        return ServedBlocks(drafter, precision)
    assert isinstance(drafter, ChainDrafter), "a drafter works in blocks or in chains"
    return ServedChains(drafter, precision)
