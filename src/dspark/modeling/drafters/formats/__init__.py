"""Drafter checkpoints of other projects, read as ours. A format is told by what config.json says,
never by a name or a path."""

from collections.abc import Callable
from pathlib import Path

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.config import OWN_SECTION, read_json
from dspark.modeling.drafters.formats import deepspec, specforge, speculators, zlab
from dspark.modeling.drafters.formats.layout import Layout, Raw

CONFIG = "config.json"

_Read = Callable[[Raw, int | None], Layout]

_BY_ARCHITECTURE: dict[str, _Read] = {
    "DFlashDraftModel": zlab.read,
    "DFlash2DraftModel": zlab.read,
    "DSparkDraftModel": specforge.read_dspark,
    "LlamaForCausalLMEagle3": specforge.read_eagle3,
}


def read_layout(folder: Path, target_layers: int | None = None) -> Layout:
    """Recognise the checkpoint in a folder and read its config.json.

    ``target_layers``: decoder layers of the target, for files which leave to it what they tap.

    Raises:
        DrafterError: unreadable, no drafter of a known format, or one with a part that is not
            computed here.
    """
    path = folder / CONFIG
    raw = Raw(read_json(path, "drafter config"), path)
    return _reader(raw)(raw, target_layers)


def _reader(raw: Raw) -> _Read:
    if OWN_SECTION in raw.fields:
        return deepspec.read
    if "speculators_model_type" in raw.fields:
        return speculators.read
    architecture = str(next(iter(raw.items("architectures") or []), ""))
    if architecture in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[architecture]
    if architecture.endswith(deepspec.ARCHITECTURES):
        # An exporter of SpecForge's writes DeepSpec's name over its own fields.
        return specforge.read_dspark if "dflash_config" in raw.fields else deepspec.read
    raise DrafterError(
        f"{raw.path} describes no drafter of a known format: its architecture is "
        f"{architecture or 'not given'}"
    )
