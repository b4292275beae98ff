"""DFlash: the parallel pass alone; every position is drafted as if the others were unknown.

Two flavours exist, told apart by the config's ``anchor_predicts``. In DeepSpec's the anchor's row
predicts the first draft, as in DSpark; in z-lab's it predicts nothing, and each mask predicts the
token of its own place.
"""

from dspark.modeling.drafters.block import BlockDrafter


class DFlash(BlockDrafter):
    """No sequential head, and none for confidence."""
