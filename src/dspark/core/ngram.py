"""Repeats in a text: its end occurred before, and what followed there may follow again.

A draft made of that ("prompt lookup", Saxena 2023) needs no weights. It is a function of the
committed tokens, nothing is drawn: its distribution q is all on the drafted token, which is so kept
with probability p(x) and corrected from p without x.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

LONGEST_KEY = 3
"""Tokens of the longest n-gram that is indexed; longer matches are found by comparing on."""

LONGEST_MATCH = 16
"""Matches longer than this are told apart no further."""

OCCURRENCES = 4
"""Latest ones of the longest indexed end, of which the match is the longest."""


class Agreement(IntEnum):
    """Of some occurrences: what followed them."""

    ALONE = 0  # there is but one
    AGREED = 1  # the same token behind each
    SPLIT = 2


@dataclass(frozen=True, slots=True)
class Match:
    """The last `length` tokens occurred before, and position `behind` followed them. `agreement`:
    of that occurrence and the others of the indexed end that were looked at."""

    length: int  # 1..LONGEST_MATCH
    behind: int
    agreement: Agreement


class NgramIndex:
    """What ends where in the first `length` tokens of a growing list."""

    def __init__(self, tokens: list[int]) -> None:
        """``tokens`` is not copied; it may grow and must not change otherwise."""
        self._tokens = tokens
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram -> behind its latest occurrence
        # [n - 1][end - n]: behind the occurrence before that of the n-gram which ends there
        self._earlier: list[list[int | None]] = [[] for _ in range(LONGEST_KEY)]
        self.length = 0

    def advance(self, length: int) -> None:
        """Take in the tokens up to this many."""
        tokens = self._tokens
        for end in range(self.length, length):  # something follows what ends here: it can be found
            for n in range(1, min(LONGEST_KEY, end) + 1):
                key = tuple(tokens[end - n : end])
                self._earlier[n - 1].append(self._behind.get(key))
                self._behind[key] = end
        self.length = max(self.length, length)

    def match(self) -> Match | None:
        """The longest of the latest occurrences of the longest indexed end; None if even the last
        token is new."""
        for n in range(min(LONGEST_KEY, self.length), 0, -1):
            lengths = {
                behind: self._common(behind, n)
                for behind in islice(self._occurrences(n), OCCURRENCES)
            }
            if lengths:
                behind = max(lengths, key=lengths.__getitem__)  # the latest of equally long ones
                return Match(lengths[behind], behind, self._agreement(lengths))
        return None

    def continuation(self, match: Match, count: int) -> list[int]:
        """The `count` tokens that followed the match. Where it runs into the end of the text, what
        lies between the two is taken to repeat itself."""
        period = self.length - match.behind
        found = self._tokens[match.behind : min(match.behind + count, self.length)]
        while len(found) < count:
            found.append(found[-period])
        return found

    def _occurrences(self, n: int) -> Iterator[int]:
        """Behind those of the last n tokens before now, latest first."""
        behind = self._behind.get(tuple(self._tokens[self.length - n : self.length]))
        while behind is not None:
            yield behind
            behind = self._earlier[n - 1][behind - n]

    def _agreement(self, behind: Collection[int]) -> Agreement:
        if len(behind) == 1:
            return Agreement.ALONE
        following = {self._tokens[place] for place in behind}
        return Agreement.AGREED if len(following) == 1 else Agreement.SPLIT

    def _common(self, behind: int, known: int) -> int:
        """How many tokens before `behind` equal the last ones, of which `known` do."""
        tokens, end, length = self._tokens, self.length, known
        longest = min(LONGEST_MATCH, behind)
        while length < longest and tokens[behind - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length
