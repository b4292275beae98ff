"""The values that cross module and process borders. Plain data: no behaviour beyond what follows
from the fields. Arrays are numpy; bytes are opaque to everyone but the worker that wrote them.

Positions are 0-based. `committed_len` counts the prompt and the output committed so far, the anchor
(last committed token, not processed by the target yet) included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = Sequence[int]
Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]


class VerificationMode(StrEnum):
    GREEDY = "greedy"
    REJECTION = "rejection"


class DraftSource(StrEnum):
    MODEL = "model"  # a trained drafter
    NGRAM = "ngram"  # prompt lookup: a function of the committed tokens, nothing is drawn


class SequenceKey(NamedTuple):
    """Names a sequence across restarts: the scheduler's incarnation and its own counter."""

    incarnation: int
    sequence: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `top_k` 0, `top_p` 1: off; `nonce` (64 bits) keys every uniform."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    nonce: int = 0

    @property
    def mode(self) -> VerificationMode:
        return VerificationMode.GREEDY if self.temperature == 0 else VerificationMode.REJECTION


# --- Draft: scheduler -> drafter -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence of a draft batch: what was committed since the drafter last heard of it.

    The drafter holds `base_committed_len` tokens of the sequence (0: start afresh, any old state is
    dropped) and features for all of them but the last. After this row it holds
    `base_committed_len + len(tokens)` tokens, and features for all but the last, the anchor.
    """

    key: SequenceKey
    base_committed_len: int
    tokens: Tokens
    features: bytes  # opaque rows in position order, for all positions now before the anchor
    num_draft: int  # tokens wanted, at most the block size
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class DraftBatch:
    step: int
    rows: tuple[DraftRow, ...]
    close: tuple[SequenceKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafted block of k tokens. q, cut and hidden are filled in `rejection` mode only, and only
    by a source that draws: otherwise q is 1 on each token.

    `in_sync` false: the drafter's length disagreed; nothing was drafted and it must be re-synced.
    """

    key: SequenceKey
    tokens: Ints  # [k]
    confidence_logits: Floats  # [k] uncalibrated logit of c_k
    in_sync: bool = True
    q: Floats | None = None  # [k] probability of each drafted token under the draft distribution
    cut: Floats | None = None  # [k] logits below this were cut by top-k/top-p (-inf: none)
    hidden: bytes = b""  # [k, d] rows in the wire dtype, from which q was computed
    source: DraftSource = DraftSource.MODEL


@dataclass(frozen=True, slots=True)
class DraftReply:
    step: int
    drafts: tuple[Draft, ...]
    seconds: float  # spent in the drafter


# --- Verify: scheduler -> verifier -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Everything the verifier must know to hold a sequence; sent with its first row."""

    tokens: Tokens  # prompt, or prompt + output when a sequence is re-opened
    sampling: SamplingParams
    max_len: int  # prompt + output can never exceed this: KV blocks are reserved for it


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One sequence of a target step: a prefill chunk, or the anchor and its admitted draft.

    The verifier holds the committed tokens, rolls back to `base_committed_len` if it holds more,
    and processes at most `num_pending` of those the target has not seen. If that reaches the
    anchor, the row also verifies `draft` (cut to the admitted length) and commits.
    """

    key: SequenceKey
    base_committed_len: int
    num_pending: int
    open: OpenSequence | None = None
    draft: Draft | None = None
    want_features: bool = False  # return the features of every row this step adds (hits included)


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    step: int
    rows: tuple[VerifyRow, ...]
    close: tuple[SequenceKey, ...] = ()


class RowStatus(StrEnum):
    OK = "ok"
    UNKNOWN = "unknown"  # the verifier does not hold these tokens: open the sequence again
    STALE = "stale"  # an older step than the last one processed; never recomputed
    CONFLICT = "conflict"  # the same step with another payload


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target did with one row. `next_token` is None while prefill goes on.

    `computed_len` = tokens now in the KV cache: after a commit, committed_len - 1.
    `cached_len` = prompt tokens that came from the prefix cache (set on the opening row).
    """

    key: SequenceKey
    status: RowStatus
    computed_len: int
    cached_len: int = 0
    accepted: int = 0
    next_token: int | None = None
    features: bytes = b""
    q_gap: float = 0.0  # largest |q sent - q rebuilt| seen on this row (rejection mode)


@dataclass(frozen=True, slots=True)
class VerifyReply:
    step: int
    verdicts: tuple[Verdict, ...]
    seconds: float  # whole step inside the verifier
    backbone_seconds: float
    head_seconds: float
    batch_tokens: int  # B, rows the target processed


@dataclass(frozen=True, slots=True)
class ProfileShape:
    """One target step to time: `batch_tokens` rows spread over `requests` sequences."""

    batch_tokens: int
    head_rows: int
    requests: int
    context: int  # tokens each request attends to


# --- Handshake -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a verifier serves. Digests are hex sha256; all sizes in tokens or units."""

    incarnation: int
    model_id: str
    target_digest: str
    head_digest: str
    fusion_digest: str  # digest of the drafter's part both sides share; "" without a drafter
    vocab_size: int
    max_context: int
    num_blocks: int
    block_size: int  # tokens per KV block
    precision: str
    device: str


@dataclass(frozen=True, slots=True)
class Scaling:
    """How confidence logits become calibrated ones: l_k / temperatures[k] + intercepts[k]."""

    temperatures: tuple[float, ...]
    intercepts: tuple[float, ...]

    @classmethod
    def none(cls, positions: int) -> Self:
        """The one that changes nothing."""
        return cls((1.0,) * positions, (0.0,) * positions)

    def fits(self, positions: int) -> bool:
        """Whether it covers so many positions and keeps the order of the logits in each."""
        return (
            len(self.temperatures) == len(self.intercepts) == positions
            and all(t > 0 and isfinite(t) for t in self.temperatures)
            and all(isfinite(b) for b in self.intercepts)
        )


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a drafter proposes. `calibration`: mode -> scaling of its confidences."""

    incarnation: int
    name: str
    target_digest: str
    fusion_digest: str
    block_size: int  # most tokens a block may have
    precision: str
    device: str
    calibration: Mapping[str, Scaling] = field(default_factory=dict)
