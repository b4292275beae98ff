"""A model's chat template, rendered as Hugging Face tokenizers render it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark.core.errors import InvalidRequestError, TargetError


class ChatTemplate:
    """Turns messages into the prompt text at whose end the assistant speaks.

    Needs no tokenizer and no torch. `variables` are the special tokens a template may name.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._variables = variables

    @classmethod
    def from_folder(cls, folder: Path, config: Mapping[str, Any]) -> Self | None:
        """The template of a checkpoint folder with this tokenizer configuration, if it has one.

        Raises:
            TargetError: the template cannot be parsed.
        """
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        tokens = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token") and value
        }
        try:
            return cls(source, tokens)
        except TemplateError as error:
            raise TargetError(f"the chat template of {folder} cannot be used: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Raises InvalidRequestError if the template refuses these messages."""
        try:
            return self._template.render(
                messages=messages, tools=None, add_generation_prompt=True, **self._variables
            )
        except (TemplateError, TypeError) as error:
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", "messages"
            ) from error


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
