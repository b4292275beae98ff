from dspark.engine.draft_context import DraftContext


def test_features_gather_until_a_draft_row_carries_them() -> None:
    context = DraftContext()
    context.extend(b"abc", 3)
    context.extend(b"d", 4)
    assert (context.wanted_start, context.has_gap, context.features) == (0, False, b"abcd")
    context.delivered(5)
    assert (context.committed_len, context.wanted_start, context.features) == (5, 4, b"")
    context.extend(b"e", 5)
    assert (context.has_gap, context.features) == (False, b"e")


def test_a_step_without_features_leaves_a_gap_that_a_fetch_fills() -> None:
    context = DraftContext()
    context.extend(b"abc", 3)
    context.delivered(4)
    context.extend(b"", 4)
    assert context.has_gap
    context.extend(b"e", 5)
    assert context.has_gap
    assert context.wanted_start == 3
    context.supply(b"de")
    assert (context.has_gap, context.features) == (False, b"de")


def test_what_the_drafter_lost_is_wanted_from_the_start() -> None:
    context = DraftContext()
    context.extend(b"abc", 3)
    context.delivered(4)
    context.forget(3)
    assert (context.committed_len, context.wanted_start, context.has_gap) == (0, 0, True)
