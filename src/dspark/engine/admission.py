"""Who may run: first come, first served, with the KV cache reserved for a sequence's whole life."""

from dataclasses import dataclass

from dspark.core.errors import ConfigError, InvalidRequestError
from dspark.core.types import SequenceKey, TargetInfo
from dspark.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step and the batch may hold. All in tokens but `max_running`, in sequences."""

    max_running: int = 32
    max_prefill_tokens: int = 256  # prompt tokens a step, over all sequences
    max_batch_tokens: int = 512  # drafts are admitted only up to this many target rows

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")


class Admission:
    """A FIFO queue in front of `max_running` slots and the verifier's KV blocks.

    Blocks are counted for `Sequence.max_len`, so a running sequence never runs out of them. Nobody
    overtakes: a small request does not pass a large one that waits for blocks.
    """

    def __init__(self, target: TargetInfo, max_running: int) -> None:
        self._target = target
        self._free_slots = max_running
        self._free_blocks = target.num_blocks
        self._waiting: dict[SequenceKey, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def free_blocks(self) -> int:
        return self._free_blocks

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises InvalidRequestError if it could not run even alone."""
        target, prompt = self._target, sequence.request.prompt
        if len(prompt) >= target.max_context:
            raise InvalidRequestError(
                f"The prompt has {len(prompt)} tokens, which leaves no room for output in a "
                f"context of {target.max_context}: shorten it.",
                "prompt",
            )
        if not all(0 <= token < target.vocab_size for token in prompt):
            raise InvalidRequestError(
                f"The prompt holds a token id outside [0, {target.vocab_size}).", "prompt"
            )
        if self._blocks(sequence) > target.num_blocks:
            raise InvalidRequestError(
                f"The request may grow to {sequence.max_len} tokens, more than the KV cache of "
                f"{target.num_blocks * target.block_size}: lower max_tokens or shorten the prompt.",
                "max_tokens",
            )
        self._waiting[sequence.key] = sequence

    def withdraw(self, key: SequenceKey) -> None:
        """Drop a sequence that still waits; other keys are ignored."""
        self._waiting.pop(key, None)

    def admit(self) -> list[Sequence]:
        """Take everyone from the head of the queue who fits now; `release` gives it back."""
        admitted: list[Sequence] = []
        for sequence in self._waiting.values():
            if self._free_slots == 0 or self._blocks(sequence) > self._free_blocks:
                break
            self._free_slots -= 1
            self._free_blocks -= self._blocks(sequence)
            admitted.append(sequence)
        for sequence in admitted:
            del self._waiting[sequence.key]
        return admitted

    def release(self, sequence: Sequence) -> None:
        self._free_slots += 1
        self._free_blocks += self._blocks(sequence)

    def _blocks(self, sequence: Sequence) -> int:
        return -(-sequence.max_len // self._target.block_size)
