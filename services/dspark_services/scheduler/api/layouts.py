"""How the two endpoints lay out the same generation."""

import time
from typing import Any, ClassVar, TypeAlias
from uuid import uuid4

Json: TypeAlias = dict[str, Any]


class Layout:
    """One answer's envelope: every chunk of a stream carries the same id, time and model.

    A subclass lays out single choices: `message` in a whole answer, and in a stream `opening` (if
    there is one), `delta` and `ending`.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str) -> None:
        self._head = {
            "id": self.prefix + uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[Json], usage: Json) -> Json:
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": usage}

    def chunk(self, *choices: Json) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": list(choices)}

    def message(self, index: int, text: str, finish: str) -> Json:
        raise NotImplementedError

    def opening(self, index: int) -> Json | None:
        raise NotImplementedError

    def delta(self, index: int, text: str) -> Json:
        raise NotImplementedError

    def ending(self, index: int, finish: str) -> Json:
        raise NotImplementedError


class CompletionLayout(Layout):
    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def message(self, index: int, text: str, finish: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, text: str) -> Json:
        return self.message(index, text, None)

    def ending(self, index: int, finish: str) -> Json:
        return self.message(index, "", finish)


class ChatLayout(Layout):
    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def message(self, index: int, text: str, finish: str) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def opening(self, index: int) -> Json:
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def delta(self, index: int, text: str) -> Json:
        return self._delta(index, {"content": text}, None)

    def ending(self, index: int, finish: str) -> Json:
        return self._delta(index, {}, finish)  # strict clients refuse a null content

    def _delta(self, index: int, delta: Json, finish: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
