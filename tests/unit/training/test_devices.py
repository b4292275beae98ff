"""Whatever training computes lies on the device that was asked for.

Held on torch's `meta` device, which has no values but refuses a tensor from elsewhere as a GPU
does.
"""

from pathlib import Path

import pytest
import torch

from dspark.core.errors import ConfigError
from dspark.modeling.backbone import LocalBackbone, PackedStep, Span
from dspark.modeling.devices import resolve_device
from dspark.modeling.head import LocalHead
from dspark.modeling.losses import LossWeights, log_normalizer
from dspark.training.dataset import Blocks, TrainingData
from dspark.training.loop import TeacherForcing
from tests.support.drafters import METHODS, TRAINED, model_on
from tests.support.responses import write_responses

META = torch.device("meta")


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
    there = [blocks.to(META) for blocks in batch]
    loss = forcing.loss(forcing.draft(there), there, batch)
    loss.total.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) > len(list(model.parameters())) / 2
    assert {own.device for own in (*gradients, loss.ce, loss.l1, loss.acceptance)} == {META}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_of_generation(precision, toy_target: Path) -> None:
    backbone = LocalBackbone(toy_target, precision, (0, 1), 16, 4, device=META)
    head = LocalHead.from_folder(toy_target, precision, META)
    spans = (Span([0, 1, 2], 6, 1), Span([4, 5, 6], 5, 1), Span([9, 8], 0, 6))
    output = backbone.forward(PackedStep(torch.arange(8), spans))
    found = (output.hidden, output.taps, head.logits(output.hidden))
    assert {own.device for own in (*found, log_normalizer(head, output.hidden))} == {META}


def test_a_tensor_from_elsewhere_is_noticed(toy_target: Path, cache: Path) -> None:
    """What the tests above rely on."""
    model = model_on(toy_target).to(META)
    forcing = TeacherForcing(model, LossWeights(), loss_decay=4.0)
    with pytest.raises(RuntimeError, match=r"meta.*device|device.*meta"):
        forcing.draft(drawn(cache, model.config.block_size))


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown device 'abacus'"):
        resolve_device("abacus")
    with pytest.raises(ConfigError, match=r"sees [0-9]+ CUDA devices here; use --device cpu"):
        resolve_device("cuda:99")
