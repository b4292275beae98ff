"""A token is any string here, so that every split of a text can be tried."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dspark.engine.text import TextStream


class Pieces:
    """Token i is the i-th piece; `rest` is what an incomplete character becomes at the end."""

    def __init__(self, pieces: list[str], rest: str = "") -> None:
        self._pieces = pieces
        self._rest = rest

    def push(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return self._rest


def deltas(pieces: list[str], stop: tuple[str, ...], rest: str = "") -> tuple[list[str], bool]:
    stream = TextStream(Pieces(pieces, rest), stop)
    given_out = []
    for token in range(len(pieces)):
        stopped = stream.push(token)
        given_out.append(stream.take())
        if stopped:
            return given_out, True
    stopped = stream.flush()
    return [*given_out, stream.take()], stopped


def test_without_stop_strings_everything_is_given_out_at_once() -> None:
    assert deltas(["ab", "", "c"], ()) == (["ab", "", "c", ""], False)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    assert deltas(["x<", "/", "b>", "<", "/", "a"], ("</a>",)) == (
        ["x", "", "</b>", "", "", "", "</a"],
        False,
    )


def test_a_stop_string_over_many_tokens_is_cut_out() -> None:
    assert deltas(["x<", "/", "a", ">y", "z"], ("</a>",)) == (["x", "", "", ""], True)


def test_the_stop_string_that_completes_first_wins() -> None:
    assert deltas(["abcd"], ("abcd", "bc")) == (["a"], True)
    assert deltas(["abcd"], ("bc", "abc")) == ([""], True)  # same end: the one that began first


def test_flush_can_complete_a_stop_string() -> None:
    assert deltas(["ab"], ("b\ufffd",), rest="\ufffd") == (["a", ""], True)
    assert deltas(["ab"], ("b!",), rest="\ufffd") == (["a", "b\ufffd"], False)


@given(
    text=st.text("ab<", max_size=20),
    cuts=st.sets(st.integers(0, 20)),
    stop=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3).map(tuple),
)
def test_text_does_not_depend_on_how_it_is_cut_into_tokens(
    text: str, cuts: set[int], stop: tuple[str, ...]
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    whole = text[: min(ends)[1]] if ends else text
    given_out, stopped = deltas(pieces, stop)
    assert ("".join(given_out), stopped) == (whole, bool(ends))
    assert whole.startswith("".join(given_out[:-1]))
