"""What holds for every drafter: training, serving, batches and growing contexts all agree."""

import pytest
import torch
from torch import Tensor

from dspark.modeling.drafters.interface import Drafter, OpenBlocks, teacher_forced
from dspark.modeling.drafters.served import serve
from tests.support.drafters import HIDDEN, METHODS, VOCAB, random_config, random_model

KINDS = pytest.mark.parametrize("kind", METHODS)


def sequence(model: Drafter, length: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Features [length, d] and tokens [length + 1]."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(length, 2 * HIDDEN, generator=generator)
    return model.fuse(taps).detach(), torch.randint(VOCAB, (length + 1,), generator=generator)


def some_drafts(model: Drafter, anchors: Tensor) -> Tensor:
    """[A, K]: the anchors, and tokens that may have been drafted after each."""
    steps = torch.arange(model.config.block_size) * 7
    return (anchors[:, None] + steps) % VOCAB


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def forced(blocks: OpenBlocks, previous: Tensor) -> Tensor:
    return teacher_forced(blocks, previous)


@KINDS
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_training_equals_serving(kind: str, family: str) -> None:
    model = random_model(random_config(**METHODS[kind], family=family))
    features, tokens = sequence(model, 20)
    positions = torch.tensor([1, 6, 20])
    previous = some_drafts(model, tokens[positions])
    size = model.config.block_size
    trained = forced(model.open_blocks(features, tokens, positions, size), previous)
    served = serve(model, "fp32")
    for row, at in enumerate(positions.tolist()):
        context = served.new_context()
        served.extend([context], features[:at], tokens[1 : at + 1], [at])
        block = forced(served.open_blocks([context]), previous[row : row + 1])
        close(block[0], trained[row])


@KINDS
def test_a_context_may_grow_in_any_pieces(kind: str) -> None:
    model = random_model(random_config(**METHODS[kind]))
    features, tokens = sequence(model, 300)  # past the first capacity: buffers grow on the way
    served = serve(model, "fp32")
    context, end = served.new_context(), 0
    for count in (1, 7, 3, 200, 89):
        rows = slice(end, end + count)
        served.extend([context], features[rows], tokens[1:][rows], [count])
        end += count
        previous = some_drafts(model, tokens[end : end + 1])
        fresh = served.new_context()
        served.extend([fresh], features[:end], tokens[1 : end + 1], [end])
        expected = forced(served.open_blocks([fresh]), previous)
        for _ in range(2):  # a block leaves nothing behind
            close(forced(served.open_blocks([context]), previous), expected)


@KINDS
def test_a_ragged_batch_equals_one_by_one(kind: str) -> None:
    model = random_model(random_config(**METHODS[kind]))
    lengths = [1, 40, 300, 7]
    parts = [sequence(model, n, seed=n) for n in lengths]
    served = serve(model, "fp32")
    contexts = [served.new_context() for _ in lengths]
    features, tokens = (
        torch.cat(each) for each in ([p[0] for p in parts], [p[1][1:] for p in parts])
    )
    served.extend(contexts, features, tokens, lengths)
    previous = some_drafts(model, torch.stack([p[1][-1] for p in parts]))
    together = forced(served.open_blocks(contexts), previous)
    for row, context in enumerate(contexts):
        alone = forced(served.open_blocks([context]), previous[row : row + 1])
        close(together[row], alone[0])


@KINDS
def test_frozen_parts_are_not_trained_nor_saved_and_all_else_is(kind: str) -> None:
    model = random_model(random_config(**METHODS[kind]))
    features, tokens = model.fuse(torch.randn(8, 2 * HIDDEN)), torch.arange(9)
    positions = torch.tensor([3, 8])
    previous = some_drafts(model, tokens[positions])
    size = model.config.block_size
    hidden = teacher_forced(model.open_blocks(features, tokens, positions, size), previous)
    head = model.sequential_head
    logits = head.combine(
        model.base_logits(hidden).flatten(0, 1), head.vectors(hidden, previous).flatten(0, 1)
    )
    loss = logits.logsumexp(-1).sum()
    confidence = model.confidence(hidden, previous)
    if confidence is not None:
        loss = loss + confidence.sum()
    loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == set()
    saved = {"head"} if model.config.own_head else set()
    assert {"embedding", "head"} & set(model.state_dict()) == saved
