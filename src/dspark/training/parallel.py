"""Training in several processes, as ``torchrun`` starts them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dspark.modeling.devices import resolve_device
from dspark.training.dataset import Blocks


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of `size` processes that train the same weights."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """The one that logs and saves."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """This process's own of the devices of that name. Raises ConfigError if there is none."""
        own = name == "cuda" and self.size > 1
        return resolve_device(f"cuda:{os.environ['LOCAL_RANK']}" if own else name)

    def part(self, batch: Sequence[Blocks]) -> list[Blocks]:
        """This process's own of what all have drawn alike."""
        return list(batch[self.rank :: self.size])

    def total(self, values: Tensor) -> Tensor:
        """The sum over the processes."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the processes, in one message."""
        if self.size == 1:
            return
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = self.total(torch.cat([grad.flatten() for grad in grads]))
        parts = torch.split(flat, [grad.numel() for grad in grads])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def agreed(self, seconds: float, stopping: bool) -> tuple[float, bool]:
        """What all go by: the first one's clock, and whether any was told to stop."""
        values = self.total(torch.tensor([seconds * self.is_first, float(stopping)]).double())
        return float(values[0]), bool(values[1])

    def wait(self) -> None:
        """For all of the others to come this far."""
        if self.size > 1:
            dist.barrier()


ALONE = Ranks()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()
