"""The bodies of the OpenAI API that are served here, and what each field may hold.

A field that asks for something this server does not do is refused; fields nobody knows are
ignored, because clients send new ones.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from dspark.core.errors import InvalidRequestError

MAX_CHOICES = 128  # of one call: prompts times n
MAX_STOP_STRINGS = 4

# Fields of OpenAI and of servers like it, each with the value that asks for nothing.
_UNSUPPORTED: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "logit_bias": {},
    "allowed_token_ids": [],
    "bad_words": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "structured_outputs": None,
}


def _refuse_unsupported(fields: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Raise for a field that is set to anything but null and its neutral value."""
    for name in fields.keys() & neutral.keys():
        value, nothing = fields[name], neutral[name]
        same_kind = isinstance(value, bool) is isinstance(nothing, bool)
        if value is not None and not (same_kind and value == nothing):
            raise InvalidRequestError(f"{name} is not supported by this server", name)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _one_or_many_prompts(value: Any) -> Any:
    """Bring the four forms of a prompt to one: a list of strings or token id lists."""
    is_one = isinstance(value, str) or (
        isinstance(value, list) and value and isinstance(value[0], int)
    )
    return [value] if is_one else value


def _must_be_text(value: str) -> str:
    if not value.isprintable() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("contains half of a surrogate pair, which is no character")
    return value


NonEmptyText = Annotated[str, Field(min_length=1), AfterValidator(_must_be_text)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

# Which branch of a union is meant follows from the value's kind, so that one error names one
# mistake. Blanks in a tag keep it out of the parameter paths that clients see.
Prompt = Annotated[
    Annotated[NonEmptyText, Tag("a text")] | Annotated[TokenIds, Tag("token ids")],
    Discriminator(lambda value: "token ids" if isinstance(value, list) else "a text"),
]


class _Body(BaseModel):
    """Null means the default, as if the field were absent."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    unsupported: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        _refuse_unsupported(fields, cls.unsupported)
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(_Body):
    include_usage: bool = False
    dspark_steps: bool = False  # extension: every chunk says what its step admitted and accepted

    unsupported = {"continuous_usage_stats": False}


class GenerationBody(_Body):
    """What both endpoints share."""

    model: str | None = Field(None, description="defaults to the one model that is served")
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 and -1: off")
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[NonEmptyText], BeforeValidator(_as_list)] = Field(
        [], max_length=MAX_STOP_STRINGS
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = Field(
        False, description="extension: choices carry the token ids of their text, too"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.seed is not None and self.temperature > 0:
            raise InvalidRequestError(
                "seed is supported only with temperature 0: sampling is not reproducible yet",
                "seed",
            )
        if "stream_options" in self.model_fields_set and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
        return self


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[list[Prompt], BeforeValidator(_one_or_many_prompts)] = Field(min_length=1)
    max_tokens: int | None = Field(16, ge=1)

    unsupported = _UNSUPPORTED | {
        "logprobs": None,
        "echo": False,
        "suffix": "",
        "best_of": 1,
        "response_format": {"type": "text"},
    }


class TextPart(BaseModel):
    type: Literal["text"]
    text: Annotated[str, AfterValidator(_must_be_text)]


Content = Annotated[
    Annotated[str, AfterValidator(_must_be_text), Tag("a text")]
    | Annotated[list[TextPart], Tag("text parts")],
    Discriminator(lambda value: "text parts" if isinstance(value, list) else "a text"),
]


class Message(BaseModel):
    """One turn; `content` is a text or its parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def for_template(self) -> dict[str, str]:
        """As chat templates know it: plain text, and `developer` by its older name."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=1, description="wins over max_tokens; without both, the setting default_max_tokens"
    )

    unsupported = _UNSUPPORTED | {
        "logprobs": False,
        "top_logprobs": None,
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "function_call": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "audio": None,
        "prediction": None,
        "web_search_options": None,
    }
