"""What a drafter's folder holds, said for a person."""

from math import prod
from pathlib import Path

from dspark.modeling.drafters.checkpoint import load_calibration, load_config, read_tensors
from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.formats import read_layout
from dspark.modeling.drafters.formats.layout import DRAFT_IDS, OWN_HEAD, Layout
from dspark.modeling.drafters.weights import open_weights

_METHODS = {
    "dspark": "DSpark",
    "dflash": "DFlash",
    "dflash2": "DFlash 2",
    "eagle3": "EAGLE-3",
    "mtp1": "MTP-1",
}


def summarise(folder: Path, target_folder: Path | None = None) -> dict[str, str]:
    """What -> how, in the order to show it. With a target, the drafter is held against it.

    Raises:
        DrafterError: the folder holds no drafter that could be served, or none of this target.
    """
    if target_folder is None:
        layout = read_layout(folder)
        # The least that its taps ask for, where only the target would know.
        config = layout.config(max(layout.fields["target_layer_ids"], default=0) + 1)
    else:
        config = load_config(folder, target_folder)
        layout = read_layout(folder, config.num_target_layers)
    read_tensors(folder, config, ())  # are they all there, and of these shapes?
    known = target_folder is not None or "num_target_layers" in layout.fields
    lines = {
        "format": layout.format,
        "method": _METHODS[config.method],
        "layers": f"{config.num_hidden_layers} of the {config.family} family, hidden size "
        f"{config.hidden_size}, MLP {config.intermediate_size}, {config.num_attention_heads} heads "
        f"of {config.head_dim} on {config.num_key_value_heads}",
        "drafts": _drafts(config),
        "heads": _heads(config),
        "taps": f"outputs of layers {', '.join(map(str, config.target_layer_ids))} of "
        f"{config.num_target_layers if known else 'the target'}, the first being 0",
        "vocabulary": _vocabulary(config),
        "made for": f"target {config.target_digest[:12]}"
        if config.target_digest
        else "any target of its shape",
        "tensors": _tensors(folder, layout),
        "calibration": ", ".join(load_calibration(folder, config)) or "none",
    }
    if config.inject_previous_feature:
        lines["layers"] += ", with the previous feature injected"
    if any(config.windows):
        causal = ", causal in the block" if config.causal_windows else ""
        seen = ", ".join(str(window or "all") for window in config.windows)
        lines["layers"] += f"; they see {seen} positions{causal}"
    return lines


def _drafts(config: DrafterConfig) -> str:
    if config.is_chain:
        return f"{config.block_size}, one after the other"
    rows = f"{config.block_size}, from {config.block_rows} rows; the anchor's row "
    return rows + ("gives the first" if config.anchor_predicts else "gives none")


def _heads(config: DrafterConfig) -> str:
    heads = ["its own LM head" if config.own_head else "the target's LM head"]
    if config.output_multiplier != 1.0:
        heads[0] += f" times {config.output_multiplier:g}"
    if config.final_logit_softcapping:
        heads[0] += f", soft-capped at {config.final_logit_softcapping:g}"
    if config.method == "dflash2":
        heads.append(f"selector of rank {config.markov_rank} over {config.selector_top_k} tokens")
    elif config.markov_rank:
        heads.append(f"{config.markov_head_type} head of rank {config.markov_rank}")
    if config.enable_confidence_head:
        reads = "" if config.confidence_head_with_markov else " without the previous token"
        heads.append(f"confidence head{reads}")
    return "; ".join(heads)


def _vocabulary(config: DrafterConfig) -> str:
    whole = f"{config.vocab_size:,} tokens"
    return f"{config.draft_vocab_size:,} of {whole}" if config.draft_vocab_size else f"all {whole}"


def _tensors(folder: Path, layout: Layout) -> str:
    maps = {layout.stored(DRAFT_IDS), "t2d"}
    with open_weights(folder) as weights:
        beside = weights.names & (layout.unused | maps) - {layout.stored(OWN_HEAD)}
        own = sorted(weights.names - beside)
        count = sum(prod(weights.shape(name)) for name in own)
        dtypes = sorted({weights.dtype(name) for name in own})
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    shown = f"{len(own)}, {count:,} parameters in {' and '.join(dtypes)}"
    if beside:
        shown += f"; and {', '.join(sorted(beside))}"
    return f"{shown}; {size / 1e6:,.1f} MB"
