from pathlib import Path

import pytest
import torch

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.checkpoint import load_drafter, save_drafter
from dspark.modeling.drafters.shared import SharedDraftParts, load_shared
from tests.support.drafters import (
    HIDDEN,
    METHODS,
    VOCAB,
    block_logits,
    model_on,
    prefixes,
    random_config,
    random_model,
)
from tests.support.tiny import tiny_target


def rows(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=generator).bfloat16().float()


def no_cut(count: int) -> torch.Tensor:
    return torch.full((count,), -torch.inf)


def test_rows_survive_the_wire_exactly() -> None:
    shared = SharedDraftParts.from_model(random_model(random_config()), "fp32")
    sent = torch.tensor([[0.0, -0.0, 1.5, -3e38, 1e-40, torch.inf] + [2.0] * (HIDDEN - 6)])
    sent = torch.cat((sent, rows(3)))
    received = shared.unpack(shared.pack(sent))
    assert torch.equal(received, sent.bfloat16().float())
    assert shared.unpack(b"").shape == (0, HIDDEN)
    with pytest.raises(DrafterError, match="not rows of 32"):
        shared.unpack(b"abc")


@pytest.mark.parametrize("draft_vocab_size", [0, 50])
@pytest.mark.parametrize("kind", METHODS)
def test_temperature_divides_the_sum_of_logits_and_bias(draft_vocab_size: int, kind: str) -> None:
    model = random_model(random_config(**METHODS[kind], draft_vocab_size=draft_vocab_size))
    shared = SharedDraftParts.from_model(model, "fp32")
    hidden, previous = rows(5), torch.tensor([0, 9, 9, 40, 79])
    temperature = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.0])
    with torch.no_grad():
        logits = block_logits(model, hidden, previous)
    columns = torch.arange(VOCAB) if model.draft_vocab is None else model.draft_vocab.ids
    expected = torch.zeros(5, VOCAB)
    expected[:, columns] = torch.softmax(logits / temperature[:, None], -1)
    q = shared.q_row(prefixes(hidden), prefixes(previous), temperature, no_cut(5))
    torch.testing.assert_close(q, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(q.double().sum(-1), torch.ones(5).double(), rtol=0, atol=1e-5)


def test_the_cut_removes_what_lies_below_it() -> None:
    model = random_model(random_config())
    shared = SharedDraftParts.from_model(model, "fp32")
    hidden, previous, ones = rows(1), torch.tensor([4]), torch.ones(1)
    with torch.no_grad():
        scaled = block_logits(shared, hidden, previous)[0].sort().values
    cut = (scaled[-3] + scaled[-4]) / 2
    q = shared.q_row([hidden], [previous], ones, cut[None])
    whole = shared.q_row([hidden], [previous], ones, no_cut(1))
    kept = q > 0
    assert kept.sum() == 3
    torch.testing.assert_close(q[kept], whole[kept] / whole[kept].sum())


def test_fp16_rows_are_rebuilt_alike_in_batches_of_another_size() -> None:
    shared = SharedDraftParts.from_model(random_model(random_config()), "fp16w")
    hidden, previous = rows(7), torch.arange(7)
    ones = torch.ones(7)
    blocks, tokens = hidden[:, None].unbind(), previous[:, None].unbind()
    together = shared.q_row(blocks, tokens, ones, no_cut(7))
    for i in range(7):
        alone = shared.q_row([blocks[i]], [tokens[i]], ones[:1], no_cut(1))
        torch.testing.assert_close(alone[0], together[i], rtol=0, atol=1e-6)


@pytest.mark.parametrize("draft_vocab_size", [0, 30])
@pytest.mark.parametrize("kind", METHODS)
def test_the_verifiers_copy_equals_the_drafters(
    tmp_path: Path, draft_vocab_size: int, kind: str
) -> None:
    target = tiny_target(tmp_path / "target", vocab_size=64)
    drafter = model_on(target, **METHODS[kind], draft_vocab_size=draft_vocab_size)
    save_drafter(drafter, tmp_path / "drafter")
    model = load_drafter(tmp_path / "drafter", target)
    ours = SharedDraftParts.from_model(model, "fp32")
    theirs = load_shared(tmp_path / "drafter", target)
    assert ours.digest == theirs.digest
    taps = torch.randn(6, 2 * HIDDEN)
    assert torch.equal(ours.fuse(taps), theirs.fuse(taps))
    assert torch.equal(ours.fuse(taps), model.fuse(taps))
    args = prefixes(rows(4)), prefixes(torch.arange(4)), torch.ones(4), no_cut(4)
    assert torch.equal(ours.q_row(*args), theirs.q_row(*args))


def test_the_digest_covers_every_shared_tensor() -> None:
    config = random_config(markov_head_type="gated")
    digests = {SharedDraftParts.from_model(random_model(config), "fp32").digest}
    heads = ("markov_w1.weight", "markov_w2.weight", "gate_proj.weight", "gate_proj.bias")
    names = ("fc.weight", "hidden_norm.weight", *(f"markov_head.{name}" for name in heads))
    for name in (*names, "draft_vocab.ids", "head"):
        model = random_model(config)
        tensor = model.head if name == "head" else model.state_dict()[name]
        tensor.view(-1)[-1] += 1
        digests.add(SharedDraftParts.from_model(model, "fp32").digest)
    assert len(digests) == 9


def test_the_digest_tells_precisions_apart_that_give_another_q() -> None:
    digests = {
        precision: SharedDraftParts.from_model(random_model(random_config()), precision).digest
        for precision in ("fp32", "fp16w", "bf16")
    }
    assert digests["fp32"] != digests["fp16w"] == digests["bf16"]  # the latter share their head
