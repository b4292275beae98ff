"""SpecForge's checkpoints of DSpark and EAGLE-3; its DFlash is z-lab's."""

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

_EAGLE3_FAMILY = "llama"  # of the layer, whatever the target's own
_EAGLE3_DRAFTS = 7  # a chain may go on as long as it likes; so far it is trained by default


def read_dspark(raw: Raw, target_layers: int | None) -> Layout:
    """See `read_layout`."""
    own = zlab.options(raw)
    own.only("projector_type", "dspark")
    rank = own.get("markov_rank", 0)
    return Layout(
        format="SpecForge DSpark",
        path=raw.path,
        fields={
            **zlab.shared_fields(raw, own, target_layers),
            **block(own.count("block_size"), bool(own.get("sample_from_anchor", True))),
            "method": "dspark" if rank else "dflash",
            "markov_rank": rank,
            "markov_head_type": str(own.get("markov_head_type", "vanilla")).lower(),
            "enable_confidence_head": _has_confidence(own),
            "confidence_head_with_markov": bool(own.get("confidence_head_with_markov", False)),
        },
    )


def read_eagle3(raw: Raw, target_layers: int | None) -> Layout:
    """See `read_layout`. Its head is trained with it, so it is part of the checkpoint."""
    raw.only("fc_norm", False)
    raw.only("norm_output", True)
    raw.only("target_hidden_size", None, raw.get("hidden_size"))
    raw.only("model_type", _EAGLE3_FAMILY, "qwen2")
    reduced = reduced_vocabulary(raw, raw.get("vocab_size"))
    return Layout(
        format="SpecForge EAGLE-3",
        path=raw.path,
        fields={
            **full_attention_shape(raw),
            "family": _EAGLE3_FAMILY,
            "method": "eagle3",
            "num_hidden_layers": raw.count("num_hidden_layers"),
            "block_size": _EAGLE3_DRAFTS,
            "target_layer_ids": _eagle3_taps(raw, target_layers),
            "draft_vocab_size": reduced,
            "own_head": True,
        },
        renamed={"layers.0.": "midlayer.", OWN_HEAD: "lm_head.weight", DRAFT_IDS: "d2t"},
        vocabulary_offsets=True,
        unused=FROZEN_COPIES | {"t2d", "d2t"},
    )


def reduced_vocabulary(raw: Raw, vocab_size: Any) -> int:
    """The size of a draft vocabulary; 0 where it is the target's whole."""
    size = raw.get("draft_vocab_size", vocab_size)
    return 0 if size == vocab_size else raw.count("draft_vocab_size")


def _has_confidence(own: Raw) -> bool:
    trained = own.number("confidence_head_alpha", 0.0) > 0
    return bool(own.get("enable_confidence_head", trained))


def _eagle3_taps(raw: Raw, target_layers: int | None) -> tuple[int, ...]:
    own = raw.section("eagle_config")
    if own.get("eagle_aux_hidden_state_layer_ids") is not None:
        return own.ids("eagle_aux_hidden_state_layer_ids")
    return default_eagle3_taps(own, target_layers)


def default_eagle3_taps(own: Raw, target_layers: int | None) -> tuple[int, ...]:
    """Early, middle and late, as EAGLE-3 came with.

    Raises:
        DrafterError: the target is not known.
    """
    if target_layers is None:
        raise own.missing("eagle_aux_hidden_state_layer_ids")
    return (1, target_layers // 2 - 1, target_layers - 4)
