"""z-lab's checkpoints: DFlash, which SpecForge writes in the same way, and DFlash 2. They hold no
embedding and no head; the anchor's row of a block predicts nothing."""

from typing import Any

from dspark.modeling.drafters.formats.layout import (
    Layout,
    Raw,
    block,
    layer_shape,
    layer_windows,
)

SECTION = "dflash_config"
CONVOLUTION_TAPS = 2

_FAMILY = "qwen3"  # of the layers, whatever the target's own


def read(raw: Raw, target_layers: int | None) -> Layout:
    """See `read_layout`."""
    own = options(raw)
    own.only("projector_type", "dflash")  # another one is another head
    own.only("shift_label", False)
    second = raw.need("architectures")[0] == "DFlash2DraftModel"
    return Layout(
        format="z-lab DFlash 2" if second else "z-lab DFlash",
        path=raw.path,
        fields={
            **shared_fields(raw, own, target_layers),
            **block(own.count("block_size"), anchor_predicts=False),
            "method": "dflash2" if second else "dflash",
            **(selector_fields(own) if second else {}),
        },
    )


def options(raw: Raw) -> Raw:
    """The fields of the section, and below them those at the top, where some files have them."""
    return Raw({**raw.fields, **raw.section(SECTION).fields}, raw.path)


def shared_fields(raw: Raw, own: Raw, target_layers: int | None) -> dict[str, Any]:
    """What all checkpoints with the section ``own`` say in the same way."""
    own.only("causal", False)
    own.only("input_embedding_scale", 1, 1.0)
    raw.only("target_hidden_size", None, raw.get("hidden_size"))
    raw.only("model_type", _FAMILY)
    fields = {
        **layer_shape(raw),
        **_windows(raw),
        "num_hidden_layers": raw.count("num_hidden_layers"),
        "mask_token_id": own.need("mask_token_id"),
        "target_layer_ids": _taps(raw, own, target_layers),
        "output_multiplier": own.number("output_multiplier", 1.0),
        "final_logit_softcapping": max(own.number("final_logit_softcapping", 0.0), 0.0),
    }
    if raw.get("num_target_layers") is not None:
        fields["num_target_layers"] = raw.count("num_target_layers")
    return fields


def selector_fields(own: Raw) -> dict[str, Any]:
    """Those of DFlash 2's head and convolutions."""
    own.only("conv_kernel_size", CONVOLUTION_TAPS)
    return {
        "markov_rank": own.count("selector_rank"),
        "selector_top_k": own.count("selector_top_k"),
        "conv_group_size": own.count("conv_group_size"),
    }


def _windows(raw: Raw) -> dict[str, Any]:
    """Layers with a window are causal within the block, unless the file says otherwise; those
    without never are."""
    windows = layer_windows(raw)
    if not windows or not all(windows):
        raw.only("is_causal", False)
    return {
        "layer_windows": windows,
        "causal_windows": bool(windows) and raw.get("is_causal", True),
    }


def _taps(raw: Raw, own: Raw, target_layers: int | None) -> tuple[int, ...]:
    """0-based decoder layers whose output is read; spread evenly where the file names none."""
    if own.get("target_layer_ids") is not None:
        return own.ids("target_layer_ids")
    layers = target_layers
    if raw.get("num_target_layers") is not None:
        layers = raw.count("num_target_layers")
    if layers is None:
        raise own.missing("target_layer_ids")
    count = raw.count("num_hidden_layers")  # as many taps as draft layers
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
