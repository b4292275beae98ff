"""Where training starts: from a drafter, or from weights copied from the target and a bigram table
for the Markov head.

The latter two change only the starting point. An *aligned start* gives the draft layers the
target's last layers and features they know (copying the layers without aligning the features is
worse than a random start); a *bigram start* gives the Markov head what counting can teach it.
"""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from dspark.core.errors import ConfigError
from dspark.modeling.drafters.block import BlockDrafter
from dspark.modeling.drafters.chain import ChainDrafter
from dspark.modeling.drafters.checkpoint import load_drafter, resolve_drafter
from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.eagle3 import Eagle3Layer
from dspark.modeling.drafters.families import new_drafter
from dspark.modeling.drafters.heads import (
    CandidateSelector,
    GatedMarkovHead,
    RNNHead,
    VanillaMarkovHead,
)
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.drafters.mtp1 import MTPLayer
from dspark.modeling.head import LocalHead
from dspark.modeling.targets import target_digest
from dspark.training.config import FitConfig
from dspark.training.shards import ResponseCache

Ints = NDArray[np.int64]
Response = tuple[Ints, NDArray[np.bool_]]
"""Token ids [L] of prompt and response, and the mask [L] that is true on the response."""

_FUSION_NOISE = 1e-3
_SHRINKAGE = 3.0
_OPEN_GATE = 4.0  # sigmoid: 0.98
_STRAIGHT = 0.5  # tanh: 0.46
_COMMON = 0.99


def first_model(config: FitConfig, target_folder: Path, cache: ResponseCache) -> Drafter:
    """What a run starts from: the drafter that it names, or a new one.

    Raises:
        ConfigError: the named drafter has another shape than the run.
        DrafterError: it cannot be read, or was made for another target.
    """
    if config.start_from is None:
        return new_model(config, target_folder, cache)
    model = load_drafter(resolve_drafter(config.start_from), target_folder)
    wanted = {**config.drafter_fields, "draft_vocab_size": config.draft_vocab_size}
    for name, value in wanted.items():
        if (found := getattr(model.config, name)) != value:
            raise ConfigError(
                f"the drafter {config.start_from} has {name} {found}, the run {value}; start from "
                "another one, or give the run the same shape"
            )
    own = model.config
    if own.own_head or own.output_multiplier != 1.0 or own.final_logit_softcapping:
        raise ConfigError(
            f"the drafter {config.start_from} has a head of its own, an output multiplier or a "
            "soft-cap, which the losses do not know; start from another one"
        )
    return model


def new_model(config: FitConfig, target_folder: Path, cache: ResponseCache) -> Drafter:
    """A drafter at its starting point, with a draft vocabulary from the responses in ``cache``."""
    target = json.loads((target_folder / "config.json").read_text())
    ids = None
    if config.draft_vocab_size:
        eos = target.get("eos_token_id") or []
        counts = token_counts(responses(cache), target["vocab_size"])
        ids = draft_vocabulary(
            counts, config.draft_vocab_size, [eos] if isinstance(eos, int) else eos
        )
    drafter = DrafterConfig.for_target(
        target_folder,
        draft_vocab_size=0 if ids is None else len(ids),
        target_digest=target_digest(target_folder),
        **config.drafter_fields,
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model = blank_model(drafter, target_folder, ids)
        if config.aligned_start:
            align(model, target_folder, cache[0].taps.float())
    if config.bigram_start and model.config.markov_rank:
        start_bigrams(model, responses(cache), config.seed)
    return model


def blank_model(config: DrafterConfig, target_folder: Path, ids: Tensor | None) -> Drafter:
    """A drafter around its target's embedding and head, its own weights random."""
    (embedding,) = read_tensors(target_folder, "model.embed_tokens.").values()
    head = LocalHead.from_folder(target_folder, "fp32").weight
    return new_drafter(config, embedding, head, ids)


def draft_vocabulary(counts: Ints, size: int, always: Iterable[int]) -> Tensor:
    """The ``size`` most frequent ids, those in ``always`` among them. counts: [V].

    Ties go to the smaller id. Returns [min(size, V)] int64, rising.
    """
    ranked = counts.astype(np.float64)
    ranked[list(always)] = np.inf
    return torch.from_numpy(np.sort(np.argsort(-ranked, kind="stable")[:size]))


def token_counts(sequences: Iterable[Response], vocab_size: int) -> Ints:
    """[V]: how often each id occurs on the loss masks of (ids, mask) pairs."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for ids, mask in sequences:
        counts += np.bincount(ids[mask], minlength=vocab_size)
    return counts


@torch.no_grad()
def align(model: Drafter, target_folder: Path, taps: Tensor) -> None:
    """Aligned start, in place.

    The draft layers become the target's that follow the last tapped one, or its last ones if too
    few follow; ``norm`` its final norm; ``fc`` the identity on the last tap, plus small noise. So
    features are the residual stream that those layers know, and every other input of the drafter
    begins as noise in it. taps: [L, n*d] of some response, for the size of that stream.

    Raises:
        ConfigError: the target has fewer layers than the drafter.
    """
    config = model.config
    if config.num_hidden_layers > config.num_target_layers:
        raise ConfigError(
            f"an aligned start of {config.num_hidden_layers} layers needs a target with as many; "
            f"it has {config.num_target_layers}"
        )
    first = min(
        config.target_layer_ids[-1] + 1, config.num_target_layers - config.num_hidden_layers
    )
    layers = [
        read_tensors(target_folder, f"model.layers.{first + index}.")
        for index in range(config.num_hidden_layers)
    ]
    d = config.hidden_size
    model.norm.load_state_dict(read_tensors(target_folder, "model.norm."))
    model.fc.weight.normal_(std=_FUSION_NOISE)
    model.fc.weight[:, -d:] += torch.eye(d)
    size = taps[:, -d:].square().mean(1).sqrt().median()
    if isinstance(model, BlockDrafter):
        _align_blocks(model, layers, size)
    else:
        _align_chain(cast(ChainDrafter, model), layers[0], size)


def _align_blocks(model: BlockDrafter, layers: list[dict[str, Tensor]], size: Tensor) -> None:
    """``hidden_norm`` is the input norm of the first copied layer, which so sees almost native keys
    and values; an injected feature starts with that norm undone: as the stream it was."""
    for layer, weights in zip(model.draft_layers, layers, strict=True):
        layer.load_state_dict(weights, strict=False)  # but for the convolutions, which do nothing
    model.hidden_norm.weight.copy_(layers[0]["input_layernorm.weight"])
    if model.inject_proj is not None:
        model.inject_proj.weight.copy_(torch.diag(size / model.hidden_norm.weight))


def _align_chain(model: ChainDrafter, weights: dict[str, Tensor], size: Tensor) -> None:
    """The feature takes the place of the stream; the embedding beside it starts as noise."""
    layer, d = model.layer, model.config.hidden_size
    if isinstance(layer, Eagle3Layer):
        layer.hidden_norm.weight.copy_(weights.pop("input_layernorm.weight"))
        for name in ("q", "k", "v"):
            key = f"self_attn.{name}_proj.weight"
            noise = _FUSION_NOISE * torch.randn_like(weights[key])
            weights[key] = torch.cat((noise, weights[key]), 1)
    elif isinstance(layer, MTPLayer):
        layer.eh_proj.weight[:, d:] = size * torch.eye(d)
    layer.load_state_dict(weights, strict=False)


@torch.no_grad()
def start_bigrams(model: Drafter, sequences: Iterable[Response], seed: int) -> None:
    """Bigram start, in place: the head's two tables become the rank-r truncation of a shrunk
    log-PMI table.

    The entry of an observed pair (a, b) with count n is ``n / (n + 3) * log(n N / (n_a n_b))``;
    unobserved pairs are 0, so that the table is sparse. sequences: (ids, loss mask); b is on the
    mask and in the draft vocabulary.

    Raises:
        ConfigError: the rank exceeds the table's.
    """
    config = model.config
    if config.markov_rank > config.num_draft_logits:
        raise ConfigError(
            f"markov_rank {config.markov_rank} exceeds the draft vocabulary of "
            f"{config.num_draft_logits}: lower it"
        )
    columns = column_of(model)
    previous, following = [], []
    for ids, mask in sequences:
        b = columns[ids[1:]]
        keep = mask[1:] & (b >= 0)
        previous.append(ids[:-1][keep])
        following.append(b[keep])
    width = config.num_draft_logits
    pairs, n = np.unique(
        np.concatenate(previous) * width + np.concatenate(following), return_counts=True
    )
    a, b = np.divmod(pairs, width)
    n_a = np.bincount(a, n, config.vocab_size)[a]
    n_b = np.bincount(b, n, width)[b]
    values = n / (n + _SHRINKAGE) * np.log(n * n.sum() / (n_a * n_b))
    table = torch.sparse_coo_tensor(
        torch.from_numpy(np.stack([a, b])),
        torch.from_numpy(values).float(),
        (config.vocab_size, width),
        check_invariants=True,
    ).coalesce()
    u, s, v = _truncated_svd(table, config.markov_rank, seed)
    before, after, head = u * s.sqrt(), v * s.sqrt(), model.sequential_head
    if isinstance(head, CandidateSelector):
        head.predecessor_codebook.copy_(before)
        head.successor_codebook.copy_(after)
    elif isinstance(head, VanillaMarkovHead):
        if isinstance(head, GatedMarkovHead):  # the table, nearly whole, to start with
            head.gate_proj.bias.fill_(_OPEN_GATE)
        if isinstance(head, RNNHead):  # the token's own part alone, where tanh is mostly straight
            # Scaled by the few largest, `after` would outweigh all else in the gradients.
            used = before[before.any(1)].abs()
            common = used.kthvalue(math.ceil(_COMMON * len(used)), dim=0).values
            scale = common.clamp_min(1e-6) / _STRAIGHT
            before, after = before / scale, after * scale
            out, token = slice(-head.rank, None), slice(head.rank, 2 * head.rank)
            head.joint_proj.weight[out] = 0.0
            head.joint_proj.weight[out, token] = torch.eye(head.rank)
            head.joint_proj.bias[out] = 0.0
        head.markov_w1.weight.copy_(before)
        head.markov_w2.weight.copy_(after)


def proposable(model: Drafter) -> Ints:
    """[D]: the id of each column of the draft logits."""
    if model.draft_vocab is None:
        return np.arange(model.config.vocab_size)
    return model.draft_vocab.ids.cpu().numpy()


def column_of(model: Drafter) -> Ints:
    """[V]: an id's column in the draft logits, -1 where the drafter cannot propose it."""
    ids = proposable(model)
    columns = np.full(model.config.vocab_size, -1, dtype=np.int64)
    columns[ids] = np.arange(len(ids))
    return columns


def responses(cache: ResponseCache) -> Iterator[Response]:
    for sequence in cache:
        yield sequence.ids.numpy().astype(np.int64), sequence.loss_mask.numpy().astype(bool)


def _truncated_svd(table: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Randomized subspace iteration (Halko et al. 2011, algorithm 5.1) on a sparse [n, m] table."""
    transposed = table.T
    generator = torch.Generator().manual_seed(seed)
    width = min(rank + 16, *table.shape)
    basis = torch.randn(table.shape[1], width, generator=generator)
    for _ in range(4):
        left, _ = torch.linalg.qr(table @ basis)
        basis, _ = torch.linalg.qr(transposed @ left)
    left, _ = torch.linalg.qr(table @ basis)
    u, s, vh = torch.linalg.svd((transposed @ left).T, full_matrices=False)
    return (left @ u)[:, :rank], s[:rank], vh.T[:, :rank]


def read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """fp32 tensors of a checkpoint folder whose names start with ``prefix``, without it."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name.startswith(prefix):
                    found[name.removeprefix(prefix)] = tensors.get_tensor(name).float()
    return found
