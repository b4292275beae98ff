"""Whether a drafter's folder was written for the target's tokenizer, where it can be told."""

import json
from pathlib import Path

from dspark.core.errors import DrafterError

_FILE = "tokenizer.json"


def check_same_tokens(folder: Path, target_folder: Path) -> None:
    """Hold the two tokenizers' numbering against each other, if both folders have one.

    Raises:
        DrafterError: a token has two numbers.
    """
    theirs = _numbers(folder / _FILE)
    if not theirs:  # as a rule; the target's own takes a while to read
        return
    ours = _numbers(target_folder / _FILE)
    both = theirs.keys() & ours.keys()
    if differing := [token for token in both if theirs[token] != ours[token]]:
        token = min(differing)
        raise DrafterError(
            f"drafter {folder} was made for another tokenizer: {token!r} is token {theirs[token]} "
            f"there, {ours[token]} in the target"
        )


def _numbers(path: Path) -> dict[str, int]:
    """Token -> id; empty if the file is absent, or of a kind that does not say."""
    try:
        raw = json.loads(path.read_text())
        vocabulary = raw["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if not isinstance(vocabulary, dict):  # a list of scored pieces, in order
        vocabulary = {piece[0]: number for number, piece in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
