"""DSpark: a block in one parallel pass, a sequential head that makes neighbours agree, and a
confidence head that says how far the block will survive (DSpark paper, section 3)."""

from dspark.modeling.drafters.block import BlockDrafter


class DSpark(BlockDrafter):
    """Its config names the sequential head (vanilla, gated or rnn) and its rank."""
