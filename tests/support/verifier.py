"""What a scheduler sees of a `TargetWorker`: requests that decode through real verify batches."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch

from dspark.core.rng import Purpose, uniform
from dspark.core.types import (
    Draft,
    OpenSequence,
    RowStatus,
    SamplingParams,
    SequenceKey,
    Verdict,
    VerifyBatch,
    VerifyReply,
    VerifyRow,
)
from dspark.modeling.backbone import LocalBackbone
from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.families import new_drafter
from dspark.modeling.drafters.shared import SharedDraftParts
from dspark.modeling.head import LocalHead
from dspark.modeling.sampling import draw
from dspark.modeling.target_worker import TargetWorker

GREEDY = SamplingParams(temperature=0.0)
TAP_LAYERS = (0,)

_incarnations = count(1 << 32)

Drafter = Callable[[list[int], int], Draft | None]
"""(committed tokens, step) -> what to verify behind them."""


def shared_parts(target: Path, *, block_size: int = 4, scale: float = 0.3) -> SharedDraftParts:
    """The verifier's parts of a random drafter, with weights large enough that q is not flat."""
    config = DrafterConfig.for_target(
        target,
        target_layer_ids=TAP_LAYERS,
        num_hidden_layers=1,
        block_size=block_size,
        mask_token_id=0,
        markov_rank=4,
        enable_confidence_head=True,
    )
    head = LocalHead.from_folder(target, "fp32").weight
    torch.manual_seed(5)
    model = new_drafter(config, torch.randn_like(head), head)
    for name, parameter in model.named_parameters():
        if name.startswith(("fc", "markov")):
            torch.nn.init.normal_(parameter, std=scale)
    return SharedDraftParts.from_model(model, "fp32")


def target_worker(
    target: Path,
    shared: SharedDraftParts | None = None,
    *,
    num_blocks: int = 128,
    block_size: int = 4,
) -> TargetWorker:
    backbone = LocalBackbone(
        target,
        "fp32",
        TAP_LAYERS if shared else (),
        num_blocks,
        block_size,
        feature_dim=shared.config.hidden_size if shared else 0,
    )
    head = LocalHead.from_folder(target, "fp32")
    return TargetWorker(
        backbone,
        head,
        shared,
        incarnation=1,
        model_id="tiny",
        target_digest="d" * 64,
        precision="fp32",
    )


def greedy_draft(key: SequenceKey, tokens: list[int]) -> Draft:
    return Draft(key, np.array(tokens, np.int64), np.zeros(len(tokens), np.float32))


def sampled_draft(
    shared: SharedDraftParts,
    key: SequenceKey,
    anchor: int,
    length: int,
    sampling: SamplingParams,
    step: int,
) -> Draft:
    """A draft as a drafter makes it, from hidden rows that are as good as random."""
    rng = torch.Generator().manual_seed(1000 * step + key.sequence)
    hidden = torch.randn(length, shared.config.hidden_size, generator=rng)
    wire = shared.pack(hidden)
    rows = shared.unpack(wire)
    temperature, cut = torch.tensor([sampling.temperature]), torch.tensor([-torch.inf])
    tokens, sent, previous = [], [], anchor
    for k in range(length):
        q = shared.q_row([rows[k : k + 1]], [torch.tensor([previous])], temperature, cut)
        u = uniform(sampling.nonce, step, Purpose.DRAFT, k)
        previous = int(draw(q, np.array([u]))[0])
        tokens.append(previous)
        sent.append(q[0, previous].item())
    return Draft(
        key=key,
        tokens=np.array(tokens, np.int64),
        confidence_logits=np.zeros(length, np.float32),
        q=np.array(sent, np.float32),
        cut=np.full(length, -np.inf, np.float32),
        hidden=wire,
    )


@dataclass
class Request:
    """One sequence on its way; `draft` proposes for it once its prompt is processed."""

    key: SequenceKey
    prompt: list[int]
    max_new: int
    draft: Drafter = lambda tokens, step: None
    sampling: SamplingParams = GREEDY
    chunk: int = 1000
    want_features: bool = False
    tokens: list[int] = field(default_factory=list)
    computed_len: int = -1  # -1: not opened yet
    features: bytes = b""
    accepted: int = 0
    verdicts: list[Verdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return len(self.output) >= self.max_new

    def row(self, step: int) -> VerifyRow:
        opening, draft = None, None
        if self.computed_len < 0:
            opening = OpenSequence(
                tuple(self.tokens), self.sampling, len(self.prompt) + self.max_new
            )
        elif len(self.tokens) - self.computed_len <= self.chunk:
            draft = self.draft(list(self.tokens), step)
            if draft is not None:
                draft = trimmed(draft, self.max_new - len(self.output) - 1)
        return VerifyRow(self.key, len(self.tokens), self.chunk, opening, draft, self.want_features)

    def absorb(self, row: VerifyRow, verdict: Verdict) -> None:
        assert verdict.status is RowStatus.OK
        self.verdicts.append(verdict)
        self.computed_len = verdict.computed_len
        self.features += verdict.features
        self.accepted += verdict.accepted
        if verdict.next_token is not None:
            drafted = [] if row.draft is None else row.draft.tokens.tolist()
            self.tokens += [*drafted[: verdict.accepted], verdict.next_token]


def trimmed(draft: Draft, length: int) -> Draft:
    """The first `length` tokens; hidden rows may stay behind, nobody looks at them."""
    return replace(
        draft,
        tokens=draft.tokens[:length],
        confidence_logits=draft.confidence_logits[:length],
        q=None if draft.q is None else draft.q[:length],
        cut=None if draft.cut is None else draft.cut[:length],
    )


def run_step(
    worker: TargetWorker, requests: list[Request], step: int, close: tuple[SequenceKey, ...] = ()
) -> VerifyReply:
    rows = tuple(request.row(step) for request in requests)
    reply = worker.verify(VerifyBatch(step, rows, close))
    for request, row, verdict in zip(requests, rows, reply.verdicts, strict=True):
        request.absorb(row, verdict)
    return reply


def run_all(worker: TargetWorker, arrivals: dict[int, list[Request]], first_step: int = 0) -> None:
    """Run until every request is done; `arrivals` says at which step each joins. All are closed."""
    running: list[Request] = []
    step = first_step
    while running or any(at >= step for at in arrivals):
        running += arrivals.get(step, [])
        finished = tuple(request.key for request in running if request.done)
        running = [request for request in running if not request.done]
        run_step(worker, running, step, finished)
        step += 1


def plain(worker: TargetWorker, prompt: list[int], max_new: int) -> list[int]:
    """Greedy decoding without drafts, alone: what every other way must equal."""
    request = Request(SequenceKey(next(_incarnations), 0), prompt, max_new)
    run_all(worker, {0: [request]})
    return request.output
