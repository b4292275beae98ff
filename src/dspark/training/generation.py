"""Batched generation with continuous refill: the fast loop under `regenerate`.

Every slot owns one slab of consecutive KV blocks, so that attention reads the cache in place. A
slot whose sequence ends takes the next prompt, whose prefill shares the step with the others'
decoding.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from dspark.core.rng import Purpose, uniform
from dspark.core.types import SamplingParams
from dspark.data.target_files import stop_ids
from dspark.modeling.backbone import LocalBackbone, PackedStep, Span
from dspark.modeling.head import LocalHead
from dspark.modeling.linear import resolve_precision
from dspark.modeling.sampling import argmax, draw, probabilities

BLOCK_SIZE = 16

_STEPS_TO_FILL = 64  # at most; well below the length of a response, so that all slots are in use


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to answer. Its uniforms are keyed by the sampling's nonce and the position, so
    neither batch mates nor a restart can change the text."""

    id: str
    domain: str
    prompt_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished job; the feature tensors are None where the generator keeps none."""

    job: Job
    response_ids: list[int]
    finish: str  # "stop" | "length"
    taps: Tensor | None  # bf16 [prompt + response, n*d]; the last row is zero
    hidden: Tensor | None  # bf16 [prompt + response, d]; the last row is zero
    log_normalizer: Tensor | None  # fp32 [prompt + response], of the logits after each token;
    # zero before the prompt's last token and on the last row


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of one user message, ready for the assistant's turn."""
    messages = [{"role": "user", "content": prompt}]
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


class LoadedTarget:
    """The target as the generation commands need it: tokenizer, backbone, head, stop ids."""

    def __init__(
        self,
        folder: Path,
        precision: str,
        tap_layers: tuple[int, ...],
        kv_tokens: int,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        resolved = resolve_precision(precision, self.device)
        num_blocks = -(-kv_tokens // BLOCK_SIZE)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.backbone = LocalBackbone(
            folder, resolved, tap_layers, num_blocks, BLOCK_SIZE, device=self.device
        )
        self.head = LocalHead.from_folder(folder, resolved, self.device)
        self.stop_ids = stop_ids(folder, self.tokenizer.convert_tokens_to_ids)

    def chat_ids(self, prompt: str) -> list[int]:
        return chat_ids(self.tokenizer, prompt)


@dataclass(slots=True)
class _Slot:
    index: int
    blocks: range
    job: Job
    processed: int = 0
    response: list[int] = field(default_factory=list)

    def new_tokens(self) -> list[int]:
        return self.response[-1:] if self.processed else self.job.prompt_ids

    def span(self) -> Span:
        return Span(self.blocks, self.processed, len(self.new_tokens()))


class BatchGenerator:
    """Answers a stream of jobs, ``batch_size`` at a time."""

    def __init__(
        self,
        target: LoadedTarget,
        batch_size: int,
        max_length: int,
        with_features: bool = True,
    ) -> None:
        """``max_length`` bounds prompt + response and is a multiple of the KV block size; the
        target's cache needs ``batch_size * max_length`` tokens."""
        self._target = target
        self._prefills_per_step = max(2, batch_size // _STEPS_TO_FILL)
        self._max_length = max_length
        per_slot = max_length // BLOCK_SIZE
        self._slabs = [range(i * per_slot, (i + 1) * per_slot) for i in range(batch_size)]
        width = target.backbone.config.hidden_size
        widths = (width * len(target.backbone.tap_layers), width) if with_features else ()
        device = target.device
        self._features = [
            torch.zeros(batch_size, max_length, each, dtype=torch.bfloat16, device=device)
            for each in widths
        ]
        self._normalizers = torch.zeros(batch_size, max_length, device=device)

    def run(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Yield the answers in the order they end. ``jobs`` is read as slots become free."""
        waiting = iter(jobs)
        active: dict[int, _Slot] = {}
        while True:
            free = [i for i in range(len(self._slabs)) if i not in active]
            for index, job in zip(free[: self._prefills_per_step], waiting, strict=False):
                active[index] = _Slot(index, self._slabs[index], job)
            if not active:
                return
            slots = [active[i] for i in sorted(active)]
            for slot, token in zip(slots, self._step(slots), strict=True):
                slot.response.append(token)
                stopped = token in self._target.stop_ids
                if stopped or len(slot.response) == slot.job.max_new_tokens:
                    del active[slot.index]
                    yield self._answer(slot, "stop" if stopped else "length")

    def _step(self, slots: list[_Slot]) -> list[int]:
        spans = tuple(slot.span() for slot in slots)
        tokens = torch.tensor([token for slot in slots for token in slot.new_tokens()])
        output = self._target.backbone.forward(PackedStep(tokens, spans))
        if self._features:
            where = torch.cat(
                [
                    torch.arange(span.start, span.start + span.length)
                    + slot.index * self._max_length
                    for slot, span in zip(slots, spans, strict=True)
                ]
            ).to(self._target.device)
            for kept, rows in zip(self._features, (output.taps, output.hidden), strict=True):
                kept.flatten(0, 1).index_copy_(0, where, rows.bfloat16())
        for slot, span in zip(slots, spans, strict=True):
            slot.processed += span.length
        last = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        ends = output.hidden.index_select(0, last.to(self._target.device))
        logits = self._target.head.logits(ends)
        if self._features:
            scored = torch.tensor([slot.processed - 1 for slot in slots])
            indices = torch.tensor([slot.index for slot in slots])
            self._normalizers[indices, scored] = logits.logsumexp(-1)
        return _next_tokens(logits, slots)

    def _answer(self, slot: _Slot, finish: str) -> Answer:
        if not self._features:
            return Answer(slot.job, slot.response, finish, None, None, None)
        length = slot.processed + 1
        taps, hidden, normalizers = (
            kept[slot.index, :length].to("cpu", copy=True)
            for kept in (*self._features, self._normalizers)
        )
        taps[-1] = hidden[-1] = 0
        normalizers[: len(slot.job.prompt_ids) - 1] = normalizers[-1] = 0
        return Answer(slot.job, slot.response, finish, taps, hidden, normalizers)


def _next_tokens(logits: Tensor, slots: list[_Slot]) -> list[int]:
    """logits: [N, V], one row a slot."""
    tokens = argmax(logits)
    rows = [i for i, slot in enumerate(slots) if slot.job.sampling.temperature > 0]
    if rows:
        sampling = [slots[i].job.sampling for i in rows]
        p, _ = probabilities(logits[rows], sampling)
        uniforms = [
            uniform(s.nonce, slots[i].processed, Purpose.BONUS, 0)
            for i, s in zip(rows, sampling, strict=True)
        ]
        tokens[rows] = draw(p, np.array(uniforms))
    return [int(token) for token in tokens]
