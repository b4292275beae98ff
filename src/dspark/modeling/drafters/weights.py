"""The tensors of a checkpoint folder, in one safetensors file or in several."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.core.errors import DrafterError

WEIGHTS = "model.safetensors"
_PARTS = "model-*.safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """Open files, by the names of the tensors they hold."""

    _files: Mapping[str, Any]

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors calls it: BF16, F32, I64, ..."""
        return str(self._files[name].get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        return cast(Tensor, self._files[name].get_tensor(name))


@contextmanager
def open_weights(folder: Path) -> Iterator[Weights]:
    """
    Raises:
        DrafterError: there are none, or what is read of them inside cannot be read.
    """
    whole = folder / WEIGHTS
    paths = [whole] if whole.exists() else sorted(folder.glob(_PARTS)) or [whole]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
            yield Weights({name: file for file in files for name in file.keys()})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"drafter weights {paths[0]} cannot be read: {error}") from error
