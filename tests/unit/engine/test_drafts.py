from dataclasses import replace

import numpy as np
import pytest

from dspark.core.types import DraftSource, SequenceKey, VerificationMode
from dspark.engine.drafts import cut, is_usable
from tests.support.world import block, check_draft

GREEDY, REJECTION = VerificationMode.GREEDY, VerificationMode.REJECTION
KEY = SequenceKey(1, 1)
GOOD = block(KEY, [1, 2, 3], mode=REJECTION)
NAN = np.array([1.0, np.nan, 1.0], np.float32)


def test_a_complete_draft_is_usable() -> None:
    assert is_usable(GOOD, 3, REJECTION, 4)
    assert is_usable(block(KEY, [1]), 3, GREEDY, 4)
    assert is_usable(block(KEY, [], mode=REJECTION), 3, REJECTION, 4)


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, in_sync=False),
        replace(GOOD, tokens=np.array([1, 2, 4])),
        replace(GOOD, tokens=np.array([1, 2, -1])),
        block(KEY, [1, 2, 3, 0], mode=REJECTION),
        replace(GOOD, confidence_logits=NAN),
        replace(GOOD, confidence_logits=NAN[:1]),
        replace(GOOD, q=None),
        replace(GOOD, q=NAN),
        replace(GOOD, cut=None),
        replace(GOOD, cut=NAN[:1]),
        replace(GOOD, hidden=b""),
        replace(GOOD, hidden=b"1234"),
    ],
)
def test_what_does_not_fit_is_not_usable(bad) -> None:
    assert not is_usable(bad, 3, REJECTION, 4)


def test_a_drafter_cannot_pass_its_drafts_off_as_lookups() -> None:
    found = replace(GOOD, source=DraftSource.NGRAM)
    assert not is_usable(found, 3, REJECTION, 4)
    shorter = cut(found, 2)
    assert shorter is not None
    assert shorter.source is DraftSource.NGRAM


def test_cutting_keeps_every_part_with_its_token() -> None:
    assert cut(GOOD, 0) is None
    for length in (1, 2, 3):
        for draft in (GOOD, block(KEY, [1, 2, 3])):
            shorter = cut(draft, length)
            assert shorter is not None
            assert shorter.tokens.tolist() == [1, 2, 3][:length]
            check_draft(shorter)
