"""A request as the engine takes it: token ids in, everything checked, nothing left to interpret."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from dspark.core.errors import InvalidRequestError
from dspark.core.types import SamplingParams

LOWEST_TEMPERATURE = 1e-5
"""Of sampling: logits over less than this overflow fp32. Whoever wants less means 0, greedy."""

_MAX_TOP_K = 2**32 - 1  # what the wire carries; more than any vocabulary


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens, or the model's context, is used up


class Detokenizer(Protocol):
    """Turns one sequence's output tokens into text, one token at a time."""

    def push(self, token: int) -> str:
        """Text that `token` completes; "" while a character is still incomplete."""
        ...

    def flush(self) -> str:
        """Text held back because its last character is incomplete; called once, at the end."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What one sequence is to generate. Raises InvalidRequestError on values no engine could serve.

    `stop` strings end the output and are cut from its text; `stop_token_ids` and `eos_ids` end it
    and stay in the token ids (and in usage) but never reach the text. `detokenizer` must be fresh.
    `weight` is what one of its tokens counts against those of other requests, where drafts compete.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    detokenizer: Detokenizer
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    weight: float = 1.0

    def __post_init__(self) -> None:
        sampling = self.sampling
        checks = (
            (len(self.prompt) > 0, "prompt", "must hold at least one token"),
            (self.max_tokens >= 1, "max_tokens", f"must be at least 1, not {self.max_tokens}"),
            (
                sampling.temperature == 0
                or (
                    math.isfinite(sampling.temperature)
                    and sampling.temperature >= LOWEST_TEMPERATURE
                ),
                "temperature",
                f"must be 0 or a finite number from {LOWEST_TEMPERATURE:g} up, "
                f"not {sampling.temperature}",
            ),
            (0 < sampling.top_p <= 1, "top_p", f"must be in (0, 1], not {sampling.top_p}"),
            (
                0 <= sampling.top_k <= _MAX_TOP_K,
                "top_k",
                f"must be 0 (off) or positive and below 2**32, not {sampling.top_k}",
            ),
            (all(self.stop), "stop", "must not contain an empty string"),
            (
                math.isfinite(self.weight) and self.weight > 0,
                "weight",
                f"must be a finite number above 0, not {self.weight}",
            ),
        )
        for ok, param, problem in checks:
            if not ok:
                raise InvalidRequestError(f"{param} {problem}", param)
