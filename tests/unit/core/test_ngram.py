from hypothesis import given
from hypothesis import strategies as st

from dspark.core.ngram import (
    LONGEST_KEY,
    LONGEST_MATCH,
    OCCURRENCES,
    Agreement,
    Match,
    NgramIndex,
)

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def held(tokens: list[int], at_once: int = 1000) -> NgramIndex:
    index = NgramIndex(tokens)
    for length in range(0, len(tokens), at_once):
        index.advance(length)
    index.advance(len(tokens))
    return index


def common(tokens: list[int], behind: int) -> int:
    """Tokens before `behind` that equal the last ones."""
    length = 0
    while length < behind and tokens[behind - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


@given(texts, st.integers(1, 5))
def test_the_longest_end_that_occurred_before_is_found(tokens: list[int], at_once: int) -> None:
    lengths = {behind: common(tokens, behind) for behind in range(1, len(tokens))}
    keyed = {behind: min(length, LONGEST_KEY) for behind, length in lengths.items()}
    best = max(keyed.values(), default=0)
    latest = sorted(behind for behind, length in keyed.items() if length == best)[-OCCURRENCES:]
    found = held(tokens, at_once).match()
    if not best:
        assert found is None
        return
    longest = max(min(lengths[behind], LONGEST_MATCH) for behind in latest)
    behind = max(own for own in latest if min(lengths[own], LONGEST_MATCH) == longest)
    alike = len({tokens[own] for own in latest}) == 1
    agreement = Agreement.SPLIT if not alike else Agreement(min(len(latest) - 1, 1))
    assert found == Match(longest, behind, agreement)


@given(texts, st.integers(1, 30))
def test_the_text_goes_on_as_it_did(tokens: list[int], count: int) -> None:
    index = held(tokens)
    match = index.match()
    if match is None:
        return
    found = index.continuation(match, count)
    whole = tokens + found
    assert found == whole[match.behind : match.behind + count]


def test_a_repeated_line_is_repeated_on() -> None:
    index = held([9, 1, 2, 3, 1, 2, 3, 1])
    match = index.match()
    assert match == Match(4, 5, Agreement.ALONE)
    assert index.continuation(match, 7) == [2, 3, 1, 2, 3, 1, 2]


def test_the_latest_of_equally_long_occurrences_is_taken_and_told_from_agreed_ones() -> None:
    assert held([1, 2, 7, 1, 2, 8, 1, 2]).match() == Match(2, 5, Agreement.SPLIT)
    assert held([1, 2, 7, 1, 2, 7, 9, 1, 2]).match() == Match(2, 5, Agreement.AGREED)
    assert held([5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2]).match() == Match(3, 3, Agreement.ALONE)


def test_a_new_word_has_no_match() -> None:
    assert held([1, 2, 3]).match() is None
    assert held([]).match() is None


@given(texts, texts)
def test_tokens_that_were_not_taken_in_do_not_count(tokens: list[int], later: list[int]) -> None:
    index = NgramIndex(tokens + later)
    index.advance(len(tokens))
    before = held(tokens)
    assert index.match() == before.match()
    match = index.match()
    if match is not None:
        assert index.continuation(match, 9) == before.continuation(match, 9)
