"""Drafter checkpoints: a folder of config.json, model.safetensors, calibration.json and README.md.

Tensors are bf16 under the published DSpark names, plus ours: ``draft_vocab.ids`` (int64), ``head``,
``inject_proj.weight`` and ``mask_vectors``. The frozen copies of the target's embedding and head
are left out; a checkpoint that carries them is accepted, and the target's own are used. What others
write is read too (`formats`).
"""

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.core.errors import DrafterError, TargetError
from dspark.core.types import Scaling, VerificationMode
from dspark.modeling.drafters.config import DrafterConfig, read_json
from dspark.modeling.drafters.families import new_drafter, tensor_shapes
from dspark.modeling.drafters.formats import CONFIG, read_layout
from dspark.modeling.drafters.formats.layout import DRAFT_IDS, draft_vocabulary
from dspark.modeling.drafters.heads import head_name
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.drafters.tokenizers import check_same_tokens
from dspark.modeling.drafters.weights import WEIGHTS as WEIGHTS
from dspark.modeling.drafters.weights import open_weights
from dspark.modeling.head import LocalHead
from dspark.modeling.targets import target_digest

CALIBRATION, CARD = "calibration.json", "README.md"

_EMBEDDING = "model.embed_tokens.weight"


def resolve_drafter(name: str) -> Path:
    """The folder of a packaged drafter, or the folder that `name` is.

    Raises:
        DrafterError: it is neither.
    """
    packaged = Path(str(resources.files("dspark"))) / "data" / "drafters" / name
    for folder in (packaged, Path(name).expanduser()):
        if folder.is_dir():
            return folder
    raise DrafterError(
        f"drafter {name!r} is neither packaged nor a folder; use --drafter none to run without"
    )


def save_drafter(
    model: Drafter,
    folder: Path,
    *,
    calibration: Mapping[str, Any] | None = None,
    card: str | None = None,
) -> None:
    """Write a checkpoint folder; a file that is not given stays as it was.

    ``calibration`` must hold ``temperatures``: verification mode -> one per position, and may hold
    ``intercepts`` like them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(model.config.to_json())
    tensors = {
        name: (tensor if name == DRAFT_IDS else tensor.to(torch.bfloat16)).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    if calibration is not None:
        (folder / CALIBRATION).write_text(json.dumps(calibration, indent=2) + "\n")
    if card is not None:
        (folder / CARD).write_text(card)


def load_drafter(folder: Path, target_folder: Path) -> Drafter:
    """The drafter in fp32, with its target's embedding and head.

    Raises:
        DrafterError: one line on what is unreadable, missing, or does not fit the target.
        TargetError: the target's own weights cannot be read.
    """
    config = load_config(folder, target_folder)
    tensors = read_tensors(folder, config)
    model = new_drafter(
        config,
        _read_embedding(target_folder),
        LocalHead.from_folder(target_folder, "fp32").weight,
        tensors.get(DRAFT_IDS),
    )
    model.load_state_dict(tensors)
    return model


def load_config(folder: Path, target_folder: Path) -> DrafterConfig:
    """Read config.json and hold it against the target's.

    Raises:
        DrafterError: unreadable, unsupported, or made for another target.
    """
    target = read_json(target_folder / "config.json", "target config")
    layers = target.get("num_hidden_layers", 0)
    config = read_layout(folder, layers).config(layers)
    for what, expected, name in (
        ("hidden size", config.hidden_size, "hidden_size"),
        ("a vocabulary of", config.vocab_size, "vocab_size"),
        ("decoder layers:", config.num_target_layers, "num_hidden_layers"),
    ):
        if target.get(name) != expected:
            raise DrafterError(
                f"drafter {folder} expects {what} {expected}, target has {target.get(name)}"
            )
    if config.target_digest and config.target_digest != (actual := target_digest(target_folder)):
        raise DrafterError(
            f"drafter {folder} was trained for target digest {config.target_digest[:12]}, "
            f"target {target_folder} has {actual[:12]}"
        )
    check_same_tokens(folder, target_folder)
    return config


def load_calibration(folder: Path, config: DrafterConfig) -> dict[str, Scaling]:
    """Verification mode -> scaling of its confidences; empty without a calibration.json. One
    without intercepts has zeros.

    Raises:
        DrafterError: unreadable, an unknown mode, or not a usable number for each position.
    """
    path = folder / CALIBRATION
    if not path.exists():
        return {}
    raw = read_json(path, "calibration")
    result = {}
    try:
        shifts = dict(raw.get("intercepts", {}))
        for mode, temperatures in raw.get("temperatures", {}).items():
            own = shifts.pop(mode, (0.0,) * config.block_size)
            result[mode] = Scaling(tuple(map(float, temperatures)), tuple(map(float, own)))
    except (AttributeError, TypeError, ValueError) as error:
        raise DrafterError(f"{path} is no calibration: {error}") from error
    if shifts:
        raise DrafterError(f"{path}: {min(shifts)} has intercepts and no temperatures")
    for mode, scaling in result.items():
        if mode not in set(VerificationMode):
            raise DrafterError(f"{path}: unknown verification mode {mode!r}")
        if not scaling.fits(config.block_size):
            raise DrafterError(
                f"{path}: {mode} needs {config.block_size} positive temperatures and, if any, as "
                "many intercepts"
            )
    return result


def read_tensors(
    folder: Path, config: DrafterConfig, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """Tensors of a checkpoint, in fp32 (ids in int64); all that were trained, or ``names``.

    Raises:
        DrafterError: the file is unreadable, lacks tensors, or has unknown or misshapen ones.
    """
    layout = read_layout(folder, config.num_target_layers)
    expected = tensor_shapes(config)
    stored = {name: layout.stored(name) for name in expected}
    with open_weights(folder) as weights:
        if missing := sorted(set(stored.values()) - weights.names):
            raise DrafterError(f"drafter {folder} lacks the tensors {', '.join(missing)}")
        if unknown := sorted(weights.names - set(stored.values()) - layout.unused):
            raise DrafterError(f"drafter {folder} has unknown tensors {', '.join(unknown)}")
        for name, shape in expected.items():
            if (actual := weights.shape(stored[name])) != shape:
                raise DrafterError(
                    f"drafter {folder}: tensor {stored[name]} has shape {actual}, expected {shape}"
                )
        wanted = expected if names is None else names
        tensors = {name: weights.tensor(stored[name]) for name in wanted}
        if DRAFT_IDS in tensors and layout.vocabulary_offsets:
            chosen = weights.tensor("t2d") if "t2d" in weights.names else None
            tensors[DRAFT_IDS] = draft_vocabulary(tensors[DRAFT_IDS], chosen, folder)
    return {name: t.long() if name == DRAFT_IDS else t.float() for name, t in tensors.items()}


def shared_tensors(config: DrafterConfig) -> tuple[str, ...]:
    """What the verifier holds a copy of: the fusion, and what forms the draft distribution."""
    shared = ("fc.", "hidden_norm.", f"{head_name(config)}.", DRAFT_IDS)
    return tuple(name for name in tensor_shapes(config) if name.startswith(shared))


def _read_embedding(target_folder: Path) -> Tensor:
    try:
        for path in sorted(target_folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                if _EMBEDDING in set(file.keys()):
                    return cast(Tensor, file.get_tensor(_EMBEDDING)).float()
    except (OSError, SafetensorError) as error:
        raise TargetError(f"the weights in {target_folder} cannot be read: {error}") from error
    raise TargetError(f"no tensor {_EMBEDDING} in the checkpoint {target_folder}")
