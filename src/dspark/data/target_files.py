"""What the small files beside a target's weights say. Read alike by whoever serves, trains on or
measures the target, torch or not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark.core.errors import TargetError

TOKENIZER_CONFIG = "tokenizer_config.json"


def read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object; an absent file says nothing.

    Raises:
        TargetError: it is there and cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise TargetError(f"{path} is not readable JSON: {error}") from error


def stop_ids(folder: Path, token_to_id: Callable[[str], Any]) -> frozenset[int]:
    """The tokens that end a text: what `generation_config.json` lists, and the tokenizer's own end
    token, which ``token_to_id`` looks up (None: there is none).

    Raises:
        TargetError: a file is there and cannot be read.
    """
    listed = read_object(folder / "generation_config.json").get("eos_token_id")
    ids = set(listed if isinstance(listed, list) else [listed])
    token = read_object(folder / TOKENIZER_CONFIG).get("eos_token")
    if token is not None:
        ids.add(token_to_id(token["content"] if isinstance(token, dict) else token))
    return frozenset(ids - {None})
