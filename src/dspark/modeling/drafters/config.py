"""What a drafter is made of, and its JSON form.

``config.json`` keeps the field names of the published DSpark checkpoints at the top level; what
exists only here sits in a section of its own (``dspark_serve``), where unknown fields are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from dspark.core.errors import DrafterError

FAMILIES = ("llama", "qwen3")
METHODS = ("dspark", "dflash", "dflash2", "eagle3", "mtp1")
MARKOV_HEADS = ("vanilla", "gated", "rnn")

_ARCHITECTURES = {  # of the published checkpoints, where there are any
    "dspark": "DSparkModel",
    "dflash": "DSparkModel",  # without its heads
    "dflash2": "DFlash2Model",
    "eagle3": "Eagle3Model",
    "mtp1": "MTP1Model",
}
OWN_SECTION = "dspark_serve"
_OWN_FIELDS = (
    "method",
    "anchor_predicts",
    "selector_top_k",
    "conv_group_size",
    "draft_vocab_size",
    "layer_windows",
    "causal_windows",
    "own_head",
    "output_multiplier",
    "final_logit_softcapping",
    "inject_previous_feature",
    "target_digest",
)
_TARGET_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_target_layers",
    "num_hidden_layers",
    "block_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Shape of a drafter. Widths, heads, RoPE and epsilon are its target's.

    Raises:
        DrafterError: on construction, if the fields contradict each other or ask for something
            that is not implemented.
    """

    method: str = "dspark"
    family: str  # "llama", or "qwen3": the same with a norm per query and key head
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]  # 0-based decoder layers whose output is tapped
    num_hidden_layers: int
    block_size: int  # drafts of a block
    mask_token_id: int = 0  # of the methods that draft a block in parallel
    anchor_predicts: bool = True  # whether the anchor's row gives the first draft, or none
    markov_rank: int = 0  # of the head that makes neighbours agree; 0: there is none
    markov_head_type: str = "vanilla"  # of DSpark
    selector_top_k: int = 16  # of DFlash 2: tokens of a position that the head chooses from
    conv_group_size: int = 16  # of DFlash 2: channels that share their dynamic kernel
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = True
    draft_vocab_size: int = 0  # 0: the whole vocabulary; otherwise the length of draft_vocab.ids
    layer_windows: tuple[int, ...] = ()  # how far each layer sees, 0: all it can; (): all layers
    causal_windows: bool = False  # in a layer with a window, a row of a block sees none after it
    own_head: bool = False  # its rows of the draft vocabulary, instead of the target's
    output_multiplier: float = 1.0  # of the head's logits, before the sequential head
    final_logit_softcapping: float = 0.0  # of the same, after it: c tanh(x / c); 0: none
    inject_previous_feature: bool = False  # also replaces the mask token by one vector a position
    target_digest: str = ""  # "": made for any target of this shape

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise DrafterError(
                f"drafter family {self.family!r} is unknown; supported are {', '.join(FAMILIES)}"
            )
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise DrafterError(f"drafter config: {name} must be a positive integer: {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise DrafterError("drafter config: query heads must be a multiple of key-value heads")
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < self._last:
            raise DrafterError(
                f"drafter config: target_layer_ids {list(ids)} must rise strictly "
                f"within 0..{self._last - 1}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DrafterError(
                f"drafter config: mask_token_id {self.mask_token_id} lies outside the vocabulary"
            )
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise DrafterError("drafter config: draft_vocab_size exceeds the vocabulary")
        if not (self.output_multiplier > 0 and self.final_logit_softcapping >= 0):
            raise DrafterError(
                "drafter config: output_multiplier must be positive, and final_logit_softcapping "
                "not negative"
            )
        self._check_method()

    def _check_method(self) -> None:
        if self.layer_windows and (
            len(self.layer_windows) != self.num_hidden_layers or min(self.layer_windows) < 0
        ):
            raise DrafterError(
                f"drafter config: layer_windows {list(self.layer_windows)} must be "
                f"{self.num_hidden_layers} numbers, none negative"
            )
        if self.method not in METHODS:
            raise DrafterError(
                f"drafter method {self.method!r} is unknown; supported are {', '.join(METHODS)}"
            )
        if self.markov_head_type not in MARKOV_HEADS:
            raise DrafterError(
                f"Markov head {self.markov_head_type!r} is not supported; choose "
                f"{' or '.join(MARKOV_HEADS)}"
            )
        has_head = self.method in ("dspark", "dflash2")
        if type(self.markov_rank) is not int or (self.markov_rank > 0) is not has_head:
            raise DrafterError(
                f"drafter config: a {self.method} drafter needs markov_rank "
                f"{'above' if has_head else 'to be'} 0, not {self.markov_rank!r}"
            )
        if self.enable_confidence_head and self.method != "dspark":
            raise DrafterError(f"a {self.method} drafter has no confidence head")
        if self.is_chain and self.num_hidden_layers != 1:
            raise DrafterError(f"a {self.method} drafter has one layer")
        if self.is_chain and any(self.layer_windows):
            raise DrafterError(
                f"a {self.method} drafter has no window: layer_windows must be empty"
            )
        if self.method == "mtp1" and self.block_size != 1:
            raise DrafterError("an mtp1 drafter drafts one token: block_size must be 1")
        if self.method == "dflash2" and (
            self.hidden_size % self.conv_group_size or not self.selector_top_k > 0
        ):
            raise DrafterError(
                "drafter config: selector_top_k must be positive, and the hidden size a multiple "
                "of conv_group_size"
            )

    @property
    def _last(self) -> int:
        return self.num_target_layers

    @property
    def is_chain(self) -> bool:
        """Whether it drafts token by token, each from the one before, instead of a whole block."""
        return self.method in ("eagle3", "mtp1")

    @property
    def head_name(self) -> str:
        """What the sequential head is called; "none" where there is none."""
        if self.method == "dflash2":
            return "selector"
        return self.markov_head_type if self.markov_rank else "none"

    @property
    def block_rows(self) -> int:
        """Rows of a parallel block: one for each draft, and the anchor's if it gives none."""
        return self.block_size + (not self.anchor_predicts)

    @property
    def windows(self) -> tuple[int, ...]:
        """Of each layer; 0 where it has none."""
        return self.layer_windows or (0,) * self.num_hidden_layers

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"

    @property
    def num_draft_logits(self) -> int:
        """Columns of the draft distribution."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def confidence_features(self) -> int:
        return self.hidden_size + self.markov_rank * self.confidence_head_with_markov

    @classmethod
    def for_target(cls, target_folder: Path, **drafter_fields: Any) -> Self:
        """A config for a new drafter: the target's shape and the fields given here."""
        raw = read_json(target_folder / "config.json", "target config")
        return cls(
            **transformer_shape(raw, target_folder / "config.json"),
            num_target_layers=raw.get("num_hidden_layers", 0),
            **drafter_fields,
        )

    @classmethod
    def from_json(cls, path: Path) -> Self:
        """Read ``config.json`` of a checkpoint.

        Raises:
            DrafterError: unreadable, a field missing, or an unknown one in our own section.
        """
        return cls.from_fields(json_fields(read_json(path, "drafter config"), path), path)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any], path: Path) -> Self:
        """Of the fields that the file ``path`` was found to give.

        Raises:
            DrafterError: one is missing, or they contradict each other.
        """
        try:
            return cls(**given)
        except TypeError as error:
            raise DrafterError(f"{path} is no complete drafter config: {error}") from error

    def to_json(self) -> str:
        values = asdict(self)
        family = values.pop("family")
        own = {name: values.pop(name) for name in _OWN_FIELDS}
        architecture = f"{family.capitalize()}{_ARCHITECTURES[self.method]}"
        head: dict[str, Any] = {"architectures": [architecture], "model_type": family}
        if self.method == "eagle3":
            head["ttt_length"] = self.block_size
        frozen = {"tie_word_embeddings": False, "hidden_act": "silu"}
        return json.dumps({**head, **frozen, **values, OWN_SECTION: own}, indent=2) + "\n"


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in ``path``, or a DrafterError that names it."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DrafterError(f"{what} {path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DrafterError(f"{what} {path} is not a JSON object")
    return value


def json_fields(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Those of a `DrafterConfig` that a config.json of ours or of DeepSpec's holds.

    Raises:
        DrafterError: the taps are missing, or a field in our own section is unknown.
    """
    own = raw.get(OWN_SECTION, {})
    if unknown := sorted(set(own) - set(_OWN_FIELDS)):
        raise DrafterError(f"{path}: unknown fields {unknown} in section {OWN_SECTION}")
    names = {field.name for field in fields(DrafterConfig)} - {"target_layer_ids", *_OWN_FIELDS}
    given = {name: raw[name] for name in names & set(raw)}
    given |= {"method": _published_method(raw)} | transformer_shape(raw, path) | own
    if "ttt_length" in raw:  # EAGLE-3's name for how far it was trained to draft
        given["block_size"] = raw["ttt_length"]
    if "target_layer_ids" not in raw:
        raise DrafterError(f"{path} lacks the field 'target_layer_ids'")
    return given | {
        "target_layer_ids": tuple(raw["target_layer_ids"]),
        "layer_windows": tuple(own.get("layer_windows", ())),
    }


def _published_method(raw: Mapping[str, Any]) -> str:
    """What a config without a section of ours describes."""
    architecture = str(next(iter(raw.get("architectures") or [""])))
    if architecture.endswith(_ARCHITECTURES["eagle3"]):
        return "eagle3"
    return "dspark" if raw.get("markov_rank") else "dflash"


def transformer_shape(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The fields a drafter takes over from a transformers config of either generation."""
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise DrafterError(f"{path}: {name} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise DrafterError(f"{path}: activation {raw['hidden_act']!r} is not supported; only silu")
    missing = [name for name in _TARGET_FIELDS if name not in raw]
    if missing:
        raise DrafterError(f"{path} lacks the fields {missing}")
    shape = {name: raw[name] for name in _TARGET_FIELDS}
    shape["family"] = str(raw.get("model_type"))
    shape["head_dim"] = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    shape["rope_parameters"] = raw.get("rope_parameters") or {
        "rope_type": "default",
        "rope_theta": raw.get("rope_theta", 10000.0),
        **(raw.get("rope_scaling") or {}),
    }
    return shape
