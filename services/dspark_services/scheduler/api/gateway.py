"""What the routes serve from: before the workers are met nothing, afterwards a driver."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from dspark.core.errors import InvalidRequestError, ModelNotFoundError, WorkerUnavailableError
from dspark.core.types import SamplingParams, TargetInfo
from dspark.engine.request import LOWEST_TEMPERATURE, Request
from dspark.ops.metrics import Metrics
from dspark.ops.settings import Settings
from dspark_services.scheduler.api.generation import Generation
from dspark_services.scheduler.api.schema import (
    MAX_CHOICES,
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from dspark_services.scheduler.api.text import TargetText
from dspark_services.scheduler.driver import Driver


@dataclass(frozen=True, slots=True)
class _Backend:
    driver: Driver
    text: TargetText


class Gateway:
    """Checks API bodies against the target that is served, and turns them into generations."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self._backend: _Backend | None = None

    def open(self, driver: Driver, text: TargetText) -> None:
        """Serve requests from now on."""
        self._backend = _Backend(driver, text)
        for gauge in (self.metrics.running, self.metrics.vllm_running):
            gauge.set_function(lambda: driver.status.running)
        for gauge in (self.metrics.waiting, self.metrics.vllm_waiting):
            gauge.set_function(lambda: driver.status.waiting)
        self.metrics.watch_calibration(
            lambda: {stream: own.positions for stream, own in driver.calibration.items()}
        )

    @property
    def driver(self) -> Driver | None:
        return None if self._backend is None else self._backend.driver

    @property
    def started(self) -> Driver:
        """The driver. Raises WorkerUnavailableError before there is one."""
        return self._started().driver

    async def complete(self, body: CompletionBody) -> Generation:
        """Start on a /v1/completions body.

        Raises:
            InvalidRequestError: it cannot be served as it is.
            OverloadedError, WorkerUnavailableError: not now.
        """
        backend = self._checked(body)
        encoded = await asyncio.to_thread(
            lambda: [backend.text.encode(p) if isinstance(p, str) else p for p in body.prompt]
        )  # long texts take long enough for running requests to feel it
        return self._start(backend, body, encoded, body.max_tokens)

    async def chat(self, body: ChatBody) -> Generation:
        """Start on a /v1/chat/completions body; raises like `complete`."""
        backend = self._checked(body)
        messages = [message.for_template() for message in body.messages]
        prompt = await asyncio.to_thread(backend.text.encode_chat, messages)
        return self._start(backend, body, [prompt], body.max_completion_tokens or body.max_tokens)

    def check_model(self, name: str) -> None:
        """Raises ModelNotFoundError unless this is the model that is served."""
        if name != self.settings.model_name:
            raise ModelNotFoundError(
                f"the model {name!r:.100} does not exist; "
                f"{self.settings.model_name!r} is served here",
                "model",
            )

    def _checked(self, body: GenerationBody) -> _Backend:
        if body.model is not None:
            self.check_model(body.model)
        return self._started()

    def _started(self) -> _Backend:
        if self._backend is None:
            raise WorkerUnavailableError("the server is still starting; retry later")
        return self._backend

    def _start(
        self,
        backend: _Backend,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
    ) -> Generation:
        if len(prompts) * body.n > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(prompts)} prompts times n = {body.n} are more than {MAX_CHOICES} choices",
                "n",
            )
        default = self.settings.default_max_tokens
        limits = [_max_tokens(len(p), max_tokens, default, backend.driver.target) for p in prompts]
        requests = [
            Request(
                prompt=tuple(prompt),
                max_tokens=limit,
                detokenizer=backend.text.detokenizer(),
                sampling=_sampling(body, backend.driver.target.vocab_size),
                stop=tuple(body.stop),
                eos_ids=backend.text.eos_ids,
            )
            for prompt, limit in zip(prompts, limits, strict=True)
            for _ in range(body.n)
        ]
        return Generation(backend.driver, self.metrics, requests, n=body.n)


def _sampling(body: GenerationBody, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=body.temperature if body.temperature >= LOWEST_TEMPERATURE else 0.0,
        top_k=min(max(body.top_k, 0), vocab_size),
        top_p=body.top_p,
        nonce=secrets.randbits(64),  # every choice draws its own numbers
    )


def _max_tokens(prompt: int, wanted: int | None, default: int, target: TargetInfo) -> int:
    """The tokens a prompt of this length may be answered with; `default` at most where the client
    names no limit, since KV blocks are reserved for all of them."""
    room = target.max_context - prompt
    if wanted is None:
        return max(1, min(default, room, target.num_blocks * target.block_size - prompt))
    if wanted > room > 0:  # a prompt without any room is refused when it is queued
        raise InvalidRequestError(
            f"{prompt} prompt tokens and max_tokens = {wanted} do not fit in a context of "
            f"{target.max_context} tokens",
            "max_tokens",
        )
    return wanted
