"""Output tokens to text, one at a time."""

from tokenizers import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """All texts that `push` and `flush` return, joined, equal decoding all tokens at once.

    What a token reads as depends on its neighbours (leading blanks, characters of several bytes).
    So a token's text is the difference between decoding a short window with it and without it, and
    nothing is given out while the window ends inside a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the tokens given out last, then those not given out
        self._num_given = 0
        self._given = ""  # text of the first `_num_given` tokens of the window

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE) or text == self._given:
            return ""
        fresh = text[len(self._given) :]
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        self._given = self._decode(self._window)
        return fresh

    def flush(self) -> str:
        return self._decode(self._window)[len(self._given) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
