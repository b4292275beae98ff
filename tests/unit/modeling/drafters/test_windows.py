"""Draft layers that see only so far."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dspark.core.errors import DrafterError
from dspark.modeling.drafters.block import BlockDrafter
from dspark.modeling.drafters.layers import in_window
from dspark.modeling.drafters.served import serve
from tests.support.drafters import METHODS, random_config, random_model

ANCHOR, WINDOW = 20, 6


def model(kind: str = "dflash2", **fields: Any) -> BlockDrafter:
    fields = {"layer_windows": (WINDOW, WINDOW), **fields}
    return cast(BlockDrafter, random_model(random_config(**METHODS[kind], **fields)))


def rows(drafter: BlockDrafter, features: Tensor, size: int | None = None) -> Tensor:
    with torch.no_grad():
        return drafter.forward_blocks(features, torch.tensor([ANCHOR]), torch.tensor([7]), size)[0]


def test_a_window_holds_its_own_position_and_those_within_reach() -> None:
    at = torch.arange(5)
    seen = [keys.nonzero()[:, 0].tolist() for keys in in_window(at, at, 2, causal=False)]
    assert seen == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4]]
    seen = [keys.nonzero()[:, 0].tolist() for keys in in_window(at, at, 2, causal=True)]
    assert seen == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_what_lies_out_of_reach_changes_nothing(kind: str) -> None:
    drafter = model(kind)
    features = torch.randn(ANCHOR, 32)
    out_of_reach, within = features.clone(), features.clone()
    out_of_reach[: ANCHOR - WINDOW + 1] = 0
    within[ANCHOR - WINDOW + 1] = 0
    expected = rows(drafter, features)
    assert torch.equal(rows(drafter, out_of_reach), expected)
    assert not torch.allclose(rows(drafter, within), expected, atol=1e-3)


def test_a_window_wider_than_everything_is_none() -> None:
    features = torch.randn(ANCHOR, 32)
    wide, none = (model(layer_windows=windows) for windows in ((100, 100), ()))
    assert torch.equal(rows(wide, features), rows(none, features))


def test_a_causal_row_does_not_see_the_rows_after_it() -> None:
    features = torch.randn(ANCHOR, 32)
    causal, open_ = (model(causal_windows=value) for value in (True, False))
    assert torch.allclose(rows(causal, features, 2), rows(causal, features)[:2], atol=1e-5)
    assert not torch.allclose(rows(open_, features, 2), rows(open_, features)[:2], atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("windows", [(WINDOW, WINDOW), (0, WINDOW), (2, 0)])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_served_sees_as_far_as_trained(kind: str, windows: tuple[int, int], causal: bool) -> None:
    drafter = model(kind, layer_windows=windows, causal_windows=causal)
    features = [torch.randn(length, 32) for length in (ANCHOR, 3)]
    anchors = torch.tensor([7, 9])
    with torch.no_grad():
        expected = [
            drafter.forward_blocks(own, torch.tensor([len(own)]), anchor[None])[0]
            for own, anchor in zip(features, anchors, strict=True)
        ]
    served = serve(drafter, "fp32")
    contexts = [served.new_context() for _ in features]
    counts = [len(own) for own in features]
    served.extend(contexts, torch.cat(features), torch.zeros(sum(counts)).long(), counts)
    found = served.open_blocks(contexts).rows(anchors)
    assert torch.allclose(found, torch.stack(expected), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "windows", "message"),
    [
        ("dflash", (4,), r"\[4\] must be 2 numbers"),
        ("dflash", (4, -1), "none negative"),
        ("eagle3", (4,), "has no window"),
    ],
)
def test_windows_that_cannot_be_are_refused(
    kind: str, windows: tuple[int, ...], message: str
) -> None:
    with pytest.raises(DrafterError, match=message):
        random_config(**METHODS[kind], layer_windows=windows)
