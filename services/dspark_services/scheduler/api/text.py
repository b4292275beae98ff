"""The text side of a target: tokenizer, chat template, and the tokens that end a text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from dspark.core.errors import InvalidRequestError, TargetError
from dspark_services.scheduler.api.chat_template import ChatTemplate
from dspark_services.scheduler.api.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class TargetText:
    """Read from a checkpoint folder's own files: the scheduler's process has no use for torch."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_ids: frozenset[int]

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Raises TargetError if the folder has no tokenizer or a damaged one."""
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the Rust side raises plain Exception
            raise TargetError(f"{folder} has no usable tokenizer.json: {error}") from error
        tokenizer.no_truncation()  # some folders carry what a training script once set
        tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        template = ChatTemplate.from_folder(folder, config)
        return cls(tokenizer, template, _eos_ids(folder, config, tokenizer))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, with the special tokens the tokenizer puts around texts."""
        return tuple(self.tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            InvalidRequestError: there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions", "messages"
            )
        text = self.chat_template.render(messages)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.tokenizer)


def _eos_ids(folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """What `generation_config.json` lists, and the tokenizer's own end token."""
    listed = _read_json(folder / "generation_config.json").get("eos_token_id")
    ids = set(listed if isinstance(listed, list) else [listed])
    token = config.get("eos_token")
    if token is not None:
        ids.add(tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token))
    return frozenset(ids - {None})


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object; an absent file says nothing."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise TargetError(f"{path} is not readable JSON: {error}") from error
