"""Checkpoints of the speculators library: the transformer's fields nested, layers counted from the
embedding, and often a draft vocabulary."""

from typing import Any

from dspark.modeling.drafters.formats import zlab
from dspark.modeling.drafters.formats.layout import (
    DRAFT_IDS,
    FROZEN_COPIES,
    OWN_HEAD,
    Layout,
    Raw,
    block,
    full_attention_shape,
)
from dspark.modeling.drafters.formats.specforge import default_eagle3_taps, reduced_vocabulary

_BLOCK_LAYERS = "qwen3"  # what block drafters are made of, whatever the nested config calls itself
_MODEL_TYPES = ("qwen3", "llama")
_TAPS, _EAGLE3_TAPS = "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"
_FROM_EMBEDDING = 1  # their 0 is the embedding's output, ours the first layer's
_VERIFIERS = {"verifier_norm.weight", "verifier_lm_head.weight"}  # kept for training alone


def read(raw: Raw, target_layers: int | None) -> Layout:
    """See `read_layout`."""
    method = raw.need("speculators_model_type")
    if method not in _READERS:
        raise raw.refusal("speculators_model_type")
    nested = raw.section("transformer_layer_config")
    nested.only("model_type", *_MODEL_TYPES)
    raw.only("target_hidden_size", None, nested.get("hidden_size"))
    fields = {
        **full_attention_shape(nested),
        "method": method,
        "num_hidden_layers": nested.count("num_hidden_layers"),
        "draft_vocab_size": reduced_vocabulary(raw, nested.get("vocab_size")),
        **_READERS[method](raw, target_layers),
    }
    renamed = {DRAFT_IDS: "d2t"}
    if method == "eagle3":
        renamed[OWN_HEAD] = "lm_head.weight"
    return Layout(
        format=f"speculators {_NAMES[method]}",
        path=raw.path,
        fields=fields,
        renamed=renamed,
        vocabulary_offsets=True,
        unused=FROZEN_COPIES | _VERIFIERS | {"t2d", "d2t"},
    )


def _dflash(raw: Raw, target_layers: int | None) -> dict[str, Any]:
    return _block_fields(raw, bool(raw.get("sample_from_anchor", False)))


def _dspark(raw: Raw, target_layers: int | None) -> dict[str, Any]:
    rank = raw.get("markov_rank", 256)
    return {
        **_block_fields(raw, _dspark_samples_anchor(raw)),
        "method": "dspark" if rank else "dflash",
        "markov_rank": rank,
        "markov_head_type": raw.get("markov_head_type", "vanilla"),
        "enable_confidence_head": raw.get("enable_confidence_head", True),
        "confidence_head_with_markov": raw.get("confidence_head_with_markov", True),
    }


def _dflash2(raw: Raw, target_layers: int | None) -> dict[str, Any]:
    return {
        **_block_fields(raw, bool(raw.get("sample_from_anchor", False))),
        **zlab.selector_fields(raw),
        "output_multiplier": raw.number("output_multiplier", 1.0),
        "final_logit_softcapping": raw.number("final_logit_softcapping", 0.0),
    }


def _eagle3(raw: Raw, target_layers: int | None) -> dict[str, Any]:
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        raw.only(name, False)
    raw.only("embed_requires_grad", False)
    taps = (
        default_eagle3_taps(raw, target_layers)
        if raw.get(_EAGLE3_TAPS) is None
        else raw.ids(_EAGLE3_TAPS, subtract=_FROM_EMBEDDING)
    )
    return {
        "block_size": _proposed_tokens(raw).count("speculative_tokens"),
        "target_layer_ids": taps,
        "own_head": True,  # theirs is frozen, but files that they converted come with trained ones
    }


_READERS = {"dflash": _dflash, "dspark": _dspark, "dflash2": _dflash2, "eagle3": _eagle3}
_NAMES = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash 2", "eagle3": "EAGLE-3"}


def _block_fields(raw: Raw, anchor_predicts: bool) -> dict[str, Any]:
    return {
        **block(raw.count("block_size"), anchor_predicts),
        "family": _BLOCK_LAYERS,
        "mask_token_id": raw.need("mask_token_id"),
        "target_layer_ids": raw.ids(_TAPS, subtract=_FROM_EMBEDDING),
    }


def _dspark_samples_anchor(raw: Raw) -> bool:
    """Files from before the field existed have the one layout or the other; the number of tokens
    they propose tells which.

    Raises:
        DrafterError: it does not.
    """
    given = raw.get("sample_from_anchor")
    if given is not None:
        return bool(given)
    rows, proposed = raw.count("block_size"), _proposed_tokens(raw).get("speculative_tokens")
    if proposed not in (rows - 1, rows):
        raise raw.missing("sample_from_anchor")
    return bool(proposed == rows)


def _proposed_tokens(raw: Raw) -> Raw:
    """The first way in which the file proposes tokens."""
    proposals = raw.section("speculators_config").items("proposal_methods")
    first = proposals[0] if proposals else {}
    return Raw({"0": first}, raw.path, "speculators_config.proposal_methods").section("0")
