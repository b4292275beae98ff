"""The parts of a drafter that its verifier holds a copy of: the fusion, and the draft distribution.

Both sides run this very code over the same tensors (the digest says so at the handshake), so the
verifier can rebuild any row of q from the hidden row and the token before it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from dspark.core.errors import DrafterError
from dspark.core.types import SamplingParams
from dspark.modeling.drafters.checkpoint import load_config, read_tensors, shared_tensors
from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.formats.layout import DRAFT_IDS, OWN_HEAD
from dspark.modeling.drafters.heads import SequentialHead, head_name, sequential_head
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.head import LocalHead
from dspark.modeling.linear import Precision, apply_precision
from dspark.modeling.sampling import probabilities


class SharedDraftParts(nn.Module):
    """Fusion, draft head and sequential head, for inference.

    Rows cross the wire in ``wire_dtype``, little-endian. ``digest`` is a SHA-256 over everything
    that decides what these parts compute: two copies that differ only in how weights are kept
    would give two different q.
    """

    wire_dtype = torch.bfloat16

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        head_rows: Tensor,
        precision: Precision,
    ) -> None:
        """tensors: those of `shared_tensors`, in fp32; head_rows: [U, d], the target head's rows of
        the draft vocabulary."""
        super().__init__()
        self.config = config
        self.draft_ids = tensors.get(DRAFT_IDS)
        with torch.device("meta"):  # only shapes: every weight is taken over, not copied
            width, taps = tensors["fc.weight"].shape
            self.fc = nn.Linear(taps, width, bias=False)
            self.hidden_norm: nn.Module = nn.Identity()
            if not config.is_chain:
                self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.add_module(head_name(config), sequential_head(config))
        self._names = shared_tensors(config)
        own = {name: tensors[name] for name in self._names if name != DRAFT_IDS}
        self.load_state_dict(own, assign=True)
        # Logits keep fp32 inputs and sums in every precision; so does the small fusion.
        head_precision: Precision = "fp32" if precision == "fp32" else "fp16w"
        self._head = LocalHead(
            head_rows,
            head_precision,
            config.output_multiplier,
            config.final_logit_softcapping or None,
        )
        self.digest = self._compute_digest(tensors, head_precision)
        apply_precision(self, head_precision)

    @classmethod
    def from_model(cls, model: Drafter, precision: Precision) -> Self:
        """The same parts as the verifier's, taken from the drafter itself."""
        return cls(model.config, model.state_dict(), model.head, precision)

    @torch.no_grad()
    def fuse(self, taps: Tensor) -> Tensor:
        """taps: [..., n * d] raw outputs of the tapped layers. Returns [..., d] fp32."""
        return cast(Tensor, self.hidden_norm(self.fc(taps.float())))

    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [N, d], already rounded to the wire dtype. Returns [N, U] fp32, without the
        sequential head's part."""
        return self._head.logits(hidden)

    @property
    def sequential_head(self) -> SequentialHead:
        return cast(SequentialHead, getattr(self, head_name(self.config)))

    @torch.no_grad()
    def q_row(
        self,
        hidden: Sequence[Tensor],
        previous: Sequence[Tensor],
        temperature: Tensor,
        cut: Tensor,
    ) -> Tensor:
        """Rebuild distributions that draft tokens were drawn from.

        For each of N drafts, its rows up to the one in question and the target ids before each:
        hidden[i] is [k_i, d] as received, previous[i] is [k_i]. temperature, cut: [N]. Tokens whose
        logit over temperature lies below the cut have probability 0, and so has all that is outside
        the draft vocabulary. Returns [N, V] fp32.
        """
        lengths = torch.tensor([len(rows) for rows in hidden])
        last = torch.arange(len(hidden)), lengths - 1
        rows = nn.utils.rnn.pad_sequence(list(hidden), batch_first=True)
        tokens = nn.utils.rnn.pad_sequence(list(previous), batch_first=True)
        vectors = self.sequential_head.vectors(rows, tokens)[last]
        logits = self.sequential_head.combine(self.base_logits(rows[last]), vectors)
        params = [SamplingParams(temperature=value) for value in temperature.tolist()]
        q, _ = probabilities(logits, params, cut)
        if self.draft_ids is None:
            return q
        full = q.new_zeros(q.shape[0], self.config.vocab_size)
        return full.index_copy_(1, self.draft_ids, q)

    def target_ids(self, columns: Tensor) -> Tensor:
        """Columns of the draft logits as ids of the target's vocabulary."""
        return columns if self.draft_ids is None else self.draft_ids[columns]

    def pack(self, rows: Tensor) -> bytes:
        """rows: [N, d], rounded to the wire dtype."""
        return rows.to(self.wire_dtype).contiguous().view(torch.int16).numpy().tobytes()

    def unpack(self, data: bytes) -> Tensor:
        """The rows of ``pack``: [N, d] fp32.

        Raises:
            DrafterError: not a whole number of rows.
        """
        width = self.config.hidden_size
        if len(data) % (2 * width):
            raise DrafterError(f"{len(data)} bytes are not rows of {width} bf16 values")
        upper_halves = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return torch.from_numpy(upper_halves.view(np.float32)).view(-1, width)

    def _compute_digest(self, tensors: Mapping[str, Tensor], precision: Precision) -> str:
        config = self.config
        shape = (
            config.method,
            config.selector_top_k,
            config.target_layer_ids,
            config.rms_norm_eps,
            str(self.wire_dtype),
        )
        digest = hashlib.sha256(f"{shape} {precision} {self._head.digest}".encode())
        for name in self._names:
            digest.update(tensors[name].detach().contiguous().numpy().tobytes())
        return digest.hexdigest()


def load_shared(
    folder: Path, target_folder: Path, precision: Precision = "fp32"
) -> SharedDraftParts:
    """The verifier's copy, from the drafter's checkpoint and the target's head.

    Raises:
        DrafterError: the checkpoint is unreadable or does not fit the target.
    """
    config = load_config(folder, target_folder)
    if config.own_head:
        tensors = read_tensors(folder, config, (*shared_tensors(config), OWN_HEAD))
        return SharedDraftParts(config, tensors, tensors[OWN_HEAD], precision)
    tensors = read_tensors(folder, config, shared_tensors(config))
    head = LocalHead.from_folder(target_folder, "fp32").weight
    rows = head[tensors[DRAFT_IDS]] if DRAFT_IDS in tensors else head
    return SharedDraftParts(config, tensors, rows, precision)
