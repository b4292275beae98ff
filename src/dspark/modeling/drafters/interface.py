"""What all drafters are: trained weights around their target's embedding and head, which turn
target features into hidden rows, and a sequential head that turns rows into drafts."""

from abc import ABC, abstractmethod
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.confidence import ConfidenceHead
from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.heads import SequentialHead, head_name, sequential_head
from dspark.modeling.drafters.layers import RotaryEmbedding
from dspark.modeling.head import shaped


class OpenBlocks(Protocol):
    """Blocks of A anchors that are being drafted, from left to right."""

    def rows(self, previous: Tensor) -> Tensor:
        """Hidden states [A, n, d] of the next n >= 1 positions, given the tokens [A] before the
        first of them: the anchors, at first. A drafter that works in parallel answers once, with
        the whole block; a chain one position at a time."""
        ...


class DraftVocabulary(nn.Module):
    """The target ids that a drafter with a reduced head can propose."""

    ids: Tensor

    def __init__(self, ids: Tensor) -> None:
        """ids: [U] int64, rising strictly."""
        super().__init__()
        self.register_buffer("ids", ids)


class Drafter(nn.Module, ABC):
    """State dict: what was trained, under the published names, and ``draft_vocab.ids``.

    The target's embedding and head are frozen, held as buffers and never saved; a head of the
    drafter's own is saved as ``head``.
    """

    embedding: Tensor
    head: Tensor  # that drafts are made with
    target_head: Tensor  # the target's, of the same tokens

    def __init__(
        self,
        config: DrafterConfig,
        embedding: Tensor,
        head: Tensor,
        draft_vocab_ids: Tensor | None = None,
    ) -> None:
        """embedding, head: the target's, [V, d] each; draft_vocab_ids: [U], for a reduced head.

        Trained weights start as normal(0, 0.02), norms as one, biases as zero.

        Raises:
            DrafterError: the tensors do not have the sizes that the config names.
        """
        super().__init__()
        _check_sizes(config, embedding, head, draft_vocab_ids)
        d = config.hidden_size
        self.config = config
        self.draft_vocab = None if draft_vocab_ids is None else DraftVocabulary(draft_vocab_ids)
        self.register_buffer("embedding", embedding, persistent=False)
        rows = head if draft_vocab_ids is None else head[draft_vocab_ids]
        self.register_buffer("target_head", rows, persistent=False)
        if config.own_head:
            rows = rows.clone()  # until its own are loaded, which must not end in the target's
        self.register_buffer("head", rows, persistent=config.own_head)
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.add_module(head_name(config), sequential_head(config))
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(config.confidence_features)
        self.add_layers(config)
        self.rotary = RotaryEmbedding(config)
        self.reset_weights()

    @abstractmethod
    def add_layers(self, config: DrafterConfig) -> None:
        """Make what lies between the features and ``norm``."""

    @property
    def sequential_head(self) -> SequentialHead:
        return cast(SequentialHead, getattr(self, head_name(self.config)))

    def reset_weights(self) -> None:
        """Put the weights where training from nothing starts."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def fuse(self, taps: Tensor) -> Tensor:
        """taps: [..., n * d], the tapped layers' raw outputs side by side. Returns [..., d]."""
        return cast(Tensor, self.fc(taps))

    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [..., d] -> U: [..., draft vocabulary] fp32, before the sequential head."""
        return self.shaped(nn.functional.linear(hidden.float(), self.head))

    def shaped(self, products: Tensor) -> Tensor:
        """U of products with the head's rows, [..., draft vocabulary] each."""
        config = self.config
        return shaped(products, config.output_multiplier, config.final_logit_softcapping or None)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """hidden: [..., d]; previous: [...] target ids of the token before each. Logits [...], or
        None from a drafter that has learnt to draft, but not how well."""
        if self.confidence_head is None:
            return None
        with_markov = self.config.confidence_head_with_markov
        embedding = self.sequential_head.embed(previous) if with_markov else None
        return cast(Tensor, self.confidence_head(hidden, embedding))

    @abstractmethod
    def open_blocks(
        self, features: Tensor, tokens: Tensor, positions: Tensor, block_size: int
    ) -> OpenBlocks:
        """Begin blocks after A anchors of one sequence.

        features: [L, d] fused, of its first L positions; tokens: [L + 1] at least, its ids;
        positions: [A] of the anchors, at most L. ``block_size`` may be shorter than the config's.
        """


def teacher_forced(blocks: OpenBlocks, previous: Tensor) -> Tensor:
    """Hidden states [A, K, d] of whole blocks. previous: [A, K], the token before each position."""
    rows = blocks.rows(previous[:, 0])
    while rows.shape[1] < previous.shape[1]:
        rows = torch.cat((rows, blocks.rows(previous[:, rows.shape[1]])), 1)
    return rows


def _check_sizes(
    config: DrafterConfig, embedding: Tensor, head: Tensor, draft_vocab_ids: Tensor | None
) -> None:
    expected = (config.vocab_size, config.hidden_size)
    for name, tensor in (("embedding", embedding), ("head", head)):
        if tuple(tensor.shape) != expected:
            raise DrafterError(
                f"the drafter expects a target {name} of {expected[0]} tokens and hidden size "
                f"{expected[1]}, the target's has shape {tuple(tensor.shape)}"
            )
    count = 0 if draft_vocab_ids is None else len(draft_vocab_ids)
    if count != config.draft_vocab_size:
        raise DrafterError(
            f"the drafter's config names {config.draft_vocab_size} draft tokens, "
            f"draft_vocab.ids holds {count}"
        )
    if draft_vocab_ids is None or draft_vocab_ids.is_meta:
        return
    ids = draft_vocab_ids.tolist()
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise DrafterError("draft_vocab.ids must rise strictly within the target's vocabulary")
