"""The class of each drafting method."""

import torch
from torch import Tensor

from dspark.modeling.drafters.config import DrafterConfig
from dspark.modeling.drafters.dflash import DFlash
from dspark.modeling.drafters.dflash2 import DFlash2
from dspark.modeling.drafters.dspark import DSpark
from dspark.modeling.drafters.eagle3 import Eagle3
from dspark.modeling.drafters.interface import Drafter
from dspark.modeling.drafters.mtp1 import MTP1

_CLASSES: dict[str, type[Drafter]] = {
    "dspark": DSpark,
    "dflash": DFlash,
    "dflash2": DFlash2,
    "eagle3": Eagle3,
    "mtp1": MTP1,
}


def new_drafter(
    config: DrafterConfig, embedding: Tensor, head: Tensor, draft_vocab_ids: Tensor | None = None
) -> Drafter:
    """As `Drafter`'s constructor, of the class for the config's method."""
    return _CLASSES[config.method](config, embedding, head, draft_vocab_ids)


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, the target's frozen ones aside."""
    with torch.device("meta"):
        frozen = torch.empty(config.vocab_size, config.hidden_size)
        ids = torch.empty(config.draft_vocab_size, dtype=torch.int64)
        model = new_drafter(config, frozen, frozen, ids if len(ids) else None)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
