"""The screened argmax is the argmax of the fp32 logits, however close they are."""

import numpy as np
import pytest
import torch

from dspark.modeling.head import HeadRows, LocalHead
from dspark.modeling.linear import has_packed_bf16
from dspark.modeling.sampling import argmax
from dspark.modeling.screen import ArgmaxScreen

pytestmark = pytest.mark.skipif(not has_packed_bf16(), reason="no packed bf16 products on this CPU")

VOCAB, WIDTH = 1000, 96  # not a whole number of blocks


def exact(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden.double() @ weight.half().double().T


@pytest.mark.parametrize("shift", [0.0, -3.0])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_largest_logit_is_found(rows: int, shift: float) -> None:
    """``shift`` makes all logits negative: nothing that is only padding may win then."""
    torch.manual_seed(rows)
    weight = torch.randn(VOCAB, WIDTH) + shift
    hidden = (torch.randn(rows, WIDTH).abs() * 3).bfloat16()
    found = ArgmaxScreen(weight).argmax(hidden)
    np.testing.assert_array_equal(found, exact(hidden, weight).argmax(-1))


def test_logits_closer_than_bf16_can_tell_are_told_apart() -> None:
    """Each row has 40 tokens within a hundredth of its largest logit, which is about 100."""
    torch.manual_seed(0)
    hidden = torch.randn(32, WIDTH).bfloat16()
    weight = torch.randn(VOCAB, WIDTH) * 0.1
    for row in range(32):
        direction = hidden[row].float() / hidden[row].float().square().sum()
        near = torch.randperm(VOCAB)[:40]
        weight[near] = 100 * direction + torch.randn(40, WIDTH) * 1e-4
        logits = exact(hidden[row : row + 1], weight)
        coarse = logits.float().bfloat16()
        assert (coarse == coarse.max()).sum() > 5  # bf16 alone would have to guess
        assert ArgmaxScreen(weight).argmax(hidden[row : row + 1])[0] == int(logits.argmax())


def test_of_equal_logits_the_lowest_token_wins() -> None:
    torch.manual_seed(0)
    weight = torch.randn(VOCAB, WIDTH)
    weight[[900, 400, 70]] = 5 * weight[400]
    hidden = weight[400].bfloat16()[None].expand(8, -1)
    assert ArgmaxScreen(weight).argmax(hidden).tolist() == [70] * 8


def test_a_row_is_judged_alike_in_any_company() -> None:
    torch.manual_seed(0)
    head = LocalHead(torch.randn(VOCAB, WIDTH), "bf16")
    rows = HeadRows(head, torch.randn(40, WIDTH).bfloat16())
    expected = argmax(head.logits(rows.hidden))
    for chosen in (range(40), range(3), [5], [9, 2, 30, 31, 8, 0, 1]):
        np.testing.assert_array_equal(rows.argmax(list(chosen)), expected[list(chosen)])
        torch.testing.assert_close(
            rows.logits(list(chosen)), head.logits(rows.hidden)[list(chosen)]
        )
