"""The DSpark drafter: a few non-causal layers over injected target features, a Markov head and a
confidence head (DSpark paper, section 3).

Row i of a block stands at absolute position s + i, where s is the anchor's, and predicts the token
at s + i + 1: row 0 holds the anchor, the others masks, and gamma rows give gamma drafts. A block
row sees the features of all positions strictly before the anchor and its whole own block.
"""

from typing import cast

import torch
from torch import Tensor, nn

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.confidence import ConfidenceHead
from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.layers import DraftLayer, Rope, RotaryEmbedding, attend
from dspark.modeling.drafters.markov import markov_head


class DraftVocabulary(nn.Module):
    """The target ids that a drafter with a reduced head can propose."""

    ids: Tensor

    def __init__(self, ids: Tensor) -> None:
        """ids: [U] int64, rising strictly."""
        super().__init__()
        self.register_buffer("ids", ids)


class DSparkModel(nn.Module):
    """State dict: what was trained, under the published names, and ``draft_vocab.ids``.

    The target's embedding and head are frozen, held as buffers and never saved.
    """

    embedding: Tensor
    head: Tensor

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
        d, size = config.hidden_size, config.block_size
        self.config = config
        self.draft_vocab = None if draft_vocab_ids is None else DraftVocabulary(draft_vocab_ids)
        self.register_buffer("embedding", embedding, persistent=False)
        rows = head if draft_vocab_ids is None else head[draft_vocab_ids]
        self.register_buffer("head", rows, persistent=False)
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.markov_head = markov_head(config)
        self.confidence_head = ConfidenceHead(config.confidence_features)
        self.inject_proj: nn.Linear | None = None
        if config.inject_previous_feature:
            self.inject_proj = nn.Linear(d, d, bias=False)
            self.mask_vectors = nn.Parameter(torch.empty(size - 1, d).normal_(std=0.02))
        self.rotary = RotaryEmbedding(config)
        self.apply(_initialise)

    # --- heads ---

    def fuse(self, taps: Tensor) -> Tensor:
        """taps: [..., n * d], the tapped layers' raw outputs side by side. Returns [..., d]."""
        return cast(Tensor, self.hidden_norm(self.fc(taps)))

    def base_logits(self, hidden: Tensor) -> Tensor:
        """hidden: [..., d] -> U: [..., draft vocabulary] fp32, before the Markov bias."""
        return nn.functional.linear(hidden.float(), self.head)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden: [..., d]; previous: [...] target ids of the token before each. Logits [...]."""
        with_markov = self.config.confidence_head_with_markov
        embedding = self.markov_head.embed(previous) if with_markov else None
        return cast(Tensor, self.confidence_head(hidden, embedding))

    # --- blocks ---

    def forward_blocks(
        self,
        features: Tensor,
        anchor_positions: Tensor,
        anchor_tokens: Tensor,
        *,
        block_size: int | None = None,
        feature_positions: Tensor | None = None,
        first_rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of A independent blocks in one pass.

        features: [L, d] fused, of one sequence, or of several end to end. Then
        ``feature_positions`` [L] counts from 0 in each, and ``first_rows`` [A] is the row where
        each anchor's sequence starts. anchor_positions, anchor_tokens: [A] int64.
        ``block_size`` may be shorter than the config's. Returns [A, block_size, d].
        """
        size = block_size or self.config.block_size
        num_rows, num_blocks, device = features.shape[0], anchor_positions.shape[0], features.device
        if feature_positions is None:
            feature_positions = torch.arange(num_rows, device=device)
        if first_rows is None:
            first_rows = torch.zeros_like(anchor_positions)
        context_end = first_rows + anchor_positions
        row = torch.arange(num_rows, device=device)
        in_context = (row >= first_rows[:, None]) & (row < context_end[:, None])
        same_block = torch.eye(num_blocks, dtype=torch.bool, device=device)
        visible = torch.cat((in_context, same_block.repeat_interleave(size, 1)), 1)
        visible = visible.repeat_interleave(size, 0)

        before_anchor = features[(context_end - 1).clamp(min=0)]
        before_anchor = before_anchor.where(anchor_positions[:, None] > 0, 0.0)
        rows = self.block_inputs(anchor_tokens, before_anchor, size)
        rope = self.block_rope(anchor_positions, size, features.dtype)
        context_rope = self.rotary(feature_positions, features.dtype)
        for layer in self.draft_layers:
            context = layer.self_attn.keys_values(features, context_rope)

            def attend_rows(
                q: Tensor, k: Tensor, v: Tensor, context: tuple[Tensor, Tensor] = context
            ) -> Tensor:
                keys, values = (torch.cat(pair, 1) for pair in zip(context, (k, v), strict=True))
                return attend(q, keys, values, visible)

            rows = layer(rows, rope, attend_rows)
        return cast(Tensor, self.norm(rows)).view(num_blocks, size, -1)

    @property
    def draft_layers(self) -> list[DraftLayer]:
        return cast(list[DraftLayer], list(self.layers))

    def block_rope(self, anchor_positions: Tensor, size: int, dtype: torch.dtype) -> Rope:
        """Of the rows of blocks whose anchors stand at positions [A]: [A * size, head_dim] each."""
        offsets = torch.arange(size, device=anchor_positions.device)
        positions = (anchor_positions[:, None] + offsets).flatten()
        return cast(Rope, self.rotary(positions, dtype))

    def block_inputs(self, anchor_tokens: Tensor, before_anchor: Tensor, size: int) -> Tensor:
        """[A], [A, d] -> the first layer's input rows [A * size, d]."""
        anchors = self.embedding[anchor_tokens][:, None]
        if self.inject_proj is None:
            masks = self.embedding[self.config.mask_token_id].expand(size - 1, -1)
        else:
            masks = self.mask_vectors[: size - 1]
        rows = torch.cat((anchors, masks.expand(len(anchors), -1, -1)), 1)
        if self.inject_proj is not None:
            rows = rows + self.inject_proj(before_anchor)[:, None]
        return rows.flatten(0, 1)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


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
    ids = [] if draft_vocab_ids is None else draft_vocab_ids.tolist()
    if len(ids) != config.draft_vocab_size:
        raise DrafterError(
            f"the drafter's config names {config.draft_vocab_size} draft tokens, "
            f"draft_vocab.ids holds {len(ids)}"
        )
    if ids and (ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= config.vocab_size):
        raise DrafterError("draft_vocab.ids must rise strictly within the target's vocabulary")
