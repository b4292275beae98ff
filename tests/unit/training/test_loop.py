from pathlib import Path

import pytest
import torch

from dspark.modeling.drafters.heads import certainty
from dspark.modeling.drafters.interface import teacher_forced
from dspark.modeling.losses import LossWeights
from dspark.training import anchors
from dspark.training.dataset import Blocks
from dspark.training.loop import TeacherForcing
from dspark.training.shards import ResponseCache
from tests.support.drafters import METHODS, block_logits, model_on
from tests.support.responses import write_responses


@pytest.fixture(scope="module")
def cache(toy_target: Path, tmp_path_factory: pytest.TempPathFactory) -> ResponseCache:
    folder = tmp_path_factory.mktemp("cache")
    write_responses(folder, toy_target, count=4, tap_layers=(0, 1))
    return ResponseCache(folder)


@pytest.mark.parametrize("kind", METHODS)
@torch.no_grad()
def test_acceptance_is_the_overlap_of_both_distributions(
    kind: str, toy_target: Path, cache: ResponseCache
) -> None:
    model = model_on(toy_target, **METHODS[kind], draft_vocab_size=20)
    if model.config.own_head:
        model.head.normal_(std=0.3)
    sequence, size = cache[1], model.config.block_size
    positions = anchors.candidates(sequence.loss_mask.numpy().astype(bool))[[2, 9]]
    blocks = Blocks.at(sequence, positions, size)
    found = TeacherForcing(model, LossWeights(), 1.0).judge([blocks])

    features = model.fuse(blocks.taps)
    opened = model.open_blocks(features, blocks.tokens, blocks.anchor_positions, size)
    hidden = teacher_forced(opened, blocks.previous)
    logits = torch.cat(
        [block_logits(model, *block) for block in zip(hidden, blocks.previous, strict=True)]
    )
    q = logits.softmax(-1)
    p = (blocks.target_hidden @ model.target_head.T - blocks.log_normalizer[:, None]).exp()
    torch.testing.assert_close(found.acceptance, torch.minimum(p, q).sum(-1), rtol=1e-3, atol=1e-4)
    if model.confidence_head is None:
        torch.testing.assert_close(found.confidence_logits, certainty(q.amax(-1)))
