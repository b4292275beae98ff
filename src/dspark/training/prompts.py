"""Training prompts: seeded code and chat prompts, and the guard against evaluation prompts."""

import hashlib
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Set

from dspark.core.errors import PromptError
from dspark.data import Prompt, load_prompts
from dspark.training.families import load_families, realise
from dspark.training.templates import from_template
from dspark.training.wrappers import Wrapper, about_code, bug, plain, stub, with_tests

_WRAPPERS: dict[Wrapper, int] = {stub: 42, plain: 26, with_tests: 14, about_code: 12, bug: 6}
_OPEN_SHARE = 0.1
_MAX_MISSES = 2000  # draws in a row without a new prompt: the templates are exhausted


def content_hash(text: str) -> str:
    """SHA-256 (hex) of the words of a text: case, spacing and punctuation do not count."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).lower())
    return hashlib.sha256(" ".join(words).encode()).hexdigest()


def hashes(prompts: Iterable[Prompt]) -> frozenset[str]:
    """The content hashes of some prompts."""
    return frozenset(content_hash(prompt.prompt) for prompt in prompts)


def exclude(prompts: Iterable[Prompt], evaluation_hashes: Set[str]) -> list[Prompt]:
    """The prompts whose content hash is not among those of the evaluation prompts."""
    return [p for p in prompts if content_hash(p.prompt) not in evaluation_hashes]


def code_prompts(n: int, seed: int, excluded: Set[str] = frozenset()) -> list[Prompt]:
    """`n` distinct code prompts; those in `excluded` and the packaged sets are left out."""
    return _collect(n, seed, "code", _code_prompt, excluded)


def chat_prompts(n: int, seed: int, excluded: Set[str] = frozenset()) -> list[Prompt]:
    """`n` distinct chat prompts; those in `excluded` and the packaged sets are left out."""
    return _collect(n, seed, "chat", lambda rng: from_template("chat", rng), excluded)


def _code_prompt(rng: random.Random) -> str:
    if rng.random() < _OPEN_SHARE:
        return from_template("open", rng)
    problem = realise(rng.choice(load_families()), rng)
    wrapper = rng.choices(list(_WRAPPERS), list(_WRAPPERS.values()))[0]
    return wrapper(problem, rng) or stub(problem, rng)


def _collect(
    n: int, seed: int, domain: str, draw: Callable[[random.Random], str], excluded: Set[str]
) -> list[Prompt]:
    rng = random.Random(f"{domain}-{seed}")
    taken = set(excluded | hashes(load_prompts()))
    prompts: list[Prompt] = []
    misses = 0
    while len(prompts) < n:
        text = draw(rng)
        digest = content_hash(text)
        misses = misses + 1 if digest in taken else 0
        if misses > _MAX_MISSES:
            raise PromptError(f"The {domain} templates give only {len(prompts)} prompts, not {n}.")
        if not misses:
            taken.add(digest)
            prompts.append(Prompt(f"{domain}-{seed}-{len(prompts):05d}", domain, text))
    return prompts
