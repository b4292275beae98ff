"""Text that comes token by token is the text of all tokens."""

import pytest
from dspark_services.scheduler.api.detokenizer import IncrementalDetokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.tiny import byte_tokenizer

TOKENIZER: Tokenizer = byte_tokenizer().backend_tokenizer
VOCABULARY = TOKENIZER.get_vocab_size()


def pieces(tokens: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@settings(deadline=None)
@given(st.lists(st.integers(0, VOCABULARY - 1)))
def test_any_tokens_give_what_decoding_them_at_once_gives(tokens: list[int]) -> None:
    assert "".join(pieces(tokens)) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_never_shows_half_a_character(text: str) -> None:
    given_out = pieces(TOKENIZER.encode(text).ids)
    assert "".join(given_out) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in given_out)


def test_a_character_of_three_bytes_appears_with_its_last() -> None:
    assert pieces(TOKENIZER.encode("a€").ids) == ["a", "", "", "€", ""]


def test_an_unfinished_character_is_shown_as_such_at_the_end() -> None:
    assert pieces(TOKENIZER.encode("€").ids[:2])[-1] == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("position", [0, 1, 2])
def test_special_tokens_have_no_text(position: int) -> None:
    tokens = TOKENIZER.encode("ab").ids
    tokens.insert(position, TOKENIZER.token_to_id("<|im_end|>"))
    assert "".join(pieces(tokens)) == "ab"
