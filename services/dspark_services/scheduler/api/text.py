"""The text side of a target: tokenizer, chat template, and the tokens that end a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from dspark.core.errors import InvalidRequestError, TargetError
from dspark.data.target_files import TOKENIZER_CONFIG, read_object, stop_ids
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
        config = read_object(folder / TOKENIZER_CONFIG)
        template = ChatTemplate.from_folder(folder, config)
        return cls(tokenizer, template, stop_ids(folder, tokenizer.token_to_id))

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
