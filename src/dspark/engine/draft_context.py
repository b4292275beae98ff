"""What the drafter holds of one sequence, and the features it still lacks."""


class DraftContext:
    """Mirrors one sequence's state in the drafter, so that the next draft row closes the gap.

    The drafter holds `committed_len` tokens, and features for all of them but the last. Verdicts
    bring the features of newly computed positions; they are kept here, in position order, until the
    next draft row carries them. If some are missing (drafting was skipped, or the drafter lost the
    sequence), the whole range has to be fetched from the verifier.
    """

    def __init__(self) -> None:
        self.committed_len = 0  # tokens the drafter holds; 0: none, the next row starts afresh
        self._start = 0  # position of the first kept feature
        self._features: list[bytes] = []

    @property
    def wanted_start(self) -> int:
        """First position whose features the drafter lacks."""
        return max(self.committed_len - 1, 0)

    @property
    def has_gap(self) -> bool:
        """Whether features are missing before those kept here."""
        return self._start != self.wanted_start

    @property
    def features(self) -> bytes:
        return b"".join(self._features)

    def extend(self, features: bytes, computed_len: int) -> None:
        """The target computed more positions, up to `computed_len`; b"": without their features."""
        if features:
            self._features.append(features)
        else:
            self._restart(computed_len)

    def supply(self, features: bytes) -> None:
        """Everything from `wanted_start` on, fetched."""
        self._start = self.wanted_start
        self._features = [features]

    def delivered(self, committed_len: int) -> None:
        """The drafter took a row with everything up to `committed_len`, the anchor included."""
        self.committed_len = committed_len
        self._restart(committed_len - 1)

    def forget(self, computed_len: int) -> None:
        """The drafter holds nothing (certain) of this sequence any more."""
        self.committed_len = 0
        self._restart(computed_len)

    def _restart(self, position: int) -> None:
        self._start = position
        self._features = []
