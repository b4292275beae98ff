"""Whatever training computes lies on the device that was asked for.

Held on torch's `meta` device, whose tensors have shapes and no values: no operation may meet one of
them and one of the CPU, but for copies and for indices in brackets, which may come from anywhere.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark.core.errors import ConfigError
from dspark.core.types import SamplingParams
from dspark.modeling.backbone import LocalBackbone, PackedStep, Span
from dspark.modeling.devices import resolve_device
from dspark.modeling.head import LocalHead
from dspark.modeling.linear import resolve_precision
from dspark.modeling.losses import LossWeights, log_normalizer
from dspark.training import generation
from dspark.training.dataset import Blocks, TrainingData
from dspark.training.generation import BatchGenerator, Job, LoadedTarget
from dspark.training.loop import TeacherForcing
from tests.support.drafters import METHODS, TRAINED, model_on
from tests.support.responses import write_responses

META = torch.device("meta")

_COPIES = ("aten._to_copy", "aten.copy_")
_BRACKETS = ("aten.index.", "aten.index_put", "aten._index_put")


class OneDevice(TorchDispatchMode):
    """Refuses what a GPU would refuse; `meta` alone lets much of it pass."""

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = str(function)
        if not name.startswith(_COPIES):
            met = [args[0], *args[2:]] if name.startswith(_BRACKETS) else [args, kwargs]
            tensors = [leaf for leaf in tree_leaves(met) if isinstance(leaf, Tensor) and leaf.dim()]
            devices = {tensor.device.type for tensor in tensors}
            assert len(devices) <= 1, f"{name} of tensors on {devices}"
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def cache(toy_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    write_responses(folder, toy_target, count=4, tap_layers=(0, 1))
    return folder


def drawn(cache: Path, block_size: int) -> list[Blocks]:
    """A batch, on the CPU."""
    data = TrainingData(cache, seed=0)
    return data.draw(0, positions=40, num_anchors=3, block_size=block_size)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_training_step(kind: str, toy_target: Path, cache: Path) -> None:
    model = model_on(toy_target, **METHODS[kind]).to(META)
    batch = drawn(cache, model.config.block_size)
    forcing = TeacherForcing(model, LossWeights(soft_ce=0.5, selector=1.0), loss_decay=4.0)
    with OneDevice():
        there = [blocks.to(META) for blocks in batch]
        loss = forcing.loss(forcing.draft(there), there, batch)
        loss.total.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) > len(list(model.parameters())) / 2
    assert {own.device for own in (*gradients, loss.ce, loss.l1, loss.acceptance)} == {META}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_pass_of_the_target(precision, toy_target: Path) -> None:
    backbone = LocalBackbone(toy_target, precision, (0, 1), 16, 4, device=META)
    head = LocalHead.from_folder(toy_target, precision, META)
    spans = (Span([0, 1, 2], 6, 1), Span([4, 5, 6], 5, 1), Span([9, 8], 0, 6))
    with OneDevice():
        output = backbone.forward(PackedStep(torch.arange(8), spans))
        found = (output.hidden, output.taps, log_normalizer(head, output.hidden))
    assert {own.device for own in found} == {META}


def test_steps_of_generation(tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the logits: tokens are chosen on the CPU, which gets no values from here."""
    loaded = LoadedTarget(tiny_target_folder, "bf16", (0, 1), 64, META)
    generator = BatchGenerator(loaded, batch_size=2, max_length=32)
    seen = []

    def choose(logits: Tensor, slots: list[Any]) -> list[int]:
        seen.append(logits.device)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return [5] * len(slots)

    monkeypatch.setattr(generation, "_next_tokens", choose)
    jobs = [Job(str(i), "chat", [1, 2, 3 + i], 8, SamplingParams()) for i in range(2)]
    with OneDevice(), pytest.raises(KeyboardInterrupt):
        list(generator.run(jobs))
    assert seen == [META] * 3


def test_a_tensor_from_elsewhere_is_noticed(toy_target: Path, cache: Path) -> None:
    """What the tests above rely on."""
    model = model_on(toy_target).to(META)
    forcing = TeacherForcing(model, LossWeights(), loss_decay=4.0)
    blocks = drawn(cache, model.config.block_size)
    with OneDevice(), pytest.raises(AssertionError, match="of tensors on"):
        forcing.draft(blocks)
    with OneDevice(), pytest.raises(AssertionError, match=r"embedding.* of tensors on"):
        torch.nn.functional.embedding(torch.arange(2), torch.empty(3, 4, device=META))


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown device 'abacus'"):
        resolve_device("abacus")
    with pytest.raises(ConfigError, match="unknown device 'meta'"):
        resolve_device("meta")
    with pytest.raises(ConfigError, match="has no device cuda:99 here: it"):
        resolve_device("cuda:99")
    with pytest.raises(ConfigError, match="fp16w is for CPUs; on cuda choose fp32 or bf16"):
        resolve_precision("fp16w", torch.device("cuda"))
