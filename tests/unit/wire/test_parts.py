"""Parts of a batch say what the batch says, and no more."""

from hypothesis import given
from hypothesis import strategies as st

from dspark.core.types import (
    DraftBatch,
    DraftRow,
    SamplingParams,
    SequenceKey,
    Verdict,
    VerifyBatch,
    VerifyReply,
    VerifyRow,
)
from dspark.core.types import RowStatus as Status
from dspark.wire.parts import join_verify, split_draft, split_verify, without_features

GREEDY = SamplingParams(temperature=0.0)
WIDTH = 2  # bytes of features a position


class Held:
    """What a drafter knows of its sequences: tokens, and features for all of them but the last."""

    def __init__(self) -> None:
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.features: dict[SequenceKey, bytes] = {}
        self.drafted: list[tuple[SequenceKey, int]] = []
        self.closed: list[SequenceKey] = []

    def take(self, batch: DraftBatch) -> None:
        self.closed += batch.close
        for row in batch.rows:
            if row.base_committed_len == 0:
                self.tokens[row.key], self.features[row.key] = [], b""
            assert row.base_committed_len == len(self.tokens[row.key])
            self.tokens[row.key] += row.tokens
            self.features[row.key] += row.features
            assert len(self.features[row.key]) == WIDTH * (len(self.tokens[row.key]) - 1)
            if row.num_draft:
                self.drafted.append((row.key, row.num_draft))


@st.composite
def draft_batches(draw: st.DrawFn) -> tuple[DraftBatch, DraftBatch]:
    """A batch that opens sequences, and one that goes on with them."""
    batches = []
    lengths = [0] * draw(st.integers(1, 4))
    for step in (1, 2):
        rows = []
        for index, held in enumerate(lengths):
            new = draw(st.integers(1, 9))
            known = max(held, 1)
            features = bytes(
                position % 256 for position in range(WIDTH * (known - 1), WIDTH * (held + new - 1))
            )
            tokens = tuple(range(held, held + new))
            rows.append(DraftRow(SequenceKey(1, index), held, tokens, features, 3, GREEDY))
            lengths[index] += new
        batches.append(DraftBatch(step, tuple(rows), close=(SequenceKey(9, step),)))
    return batches[0], batches[1]


def leaves(batch: DraftBatch) -> list[DraftBatch]:
    halves = split_draft(batch)
    return [batch] if halves is None else [leaf for half in halves for leaf in leaves(half)]


@given(draft_batches())
def test_a_drafter_ends_up_with_the_same_from_the_smallest_parts(
    batches: tuple[DraftBatch, DraftBatch],
) -> None:
    whole, parts = Held(), Held()
    for batch in batches:
        whole.take(batch)
        for part in leaves(batch):
            assert part.step == batch.step
            assert [len(row.tokens) for row in part.rows] == [1]
            parts.take(part)
    assert vars(parts) == vars(whole)


def verify_batch(rows: int) -> VerifyBatch:
    keys = [SequenceKey(1, index) for index in range(rows)]
    return VerifyBatch(4, tuple(VerifyRow(key, 9, 1) for key in keys), (SequenceKey(1, 99),))


@given(st.integers(2, 20))
def test_every_row_and_every_close_of_a_step_is_in_one_half(rows: int) -> None:
    batch = verify_batch(rows)
    halves = split_verify(batch)
    assert halves is not None
    first, second = halves
    assert first.rows
    assert second.rows
    assert first.rows + second.rows == batch.rows
    assert (first.close, second.close) == (batch.close, ())  # closing first makes room
    assert first.step == second.step == batch.step


def test_a_single_row_is_not_split() -> None:
    assert split_verify(verify_batch(1)) is None
    row = DraftRow(SequenceKey(1, 1), 5, (7,), b"ab", 3, GREEDY)
    assert split_draft(DraftBatch(1, (row,))) is None
    assert split_draft(DraftBatch(1, (), close=(row.key,))) is None


def test_replies_to_halves_make_one() -> None:
    first, second = (
        VerifyReply(4, (Verdict(SequenceKey(1, n), Status.OK, 9, features=b"f"),), n, n, n, n)
        for n in (1, 2)
    )
    whole = join_verify(first, second)
    assert [verdict.key.sequence for verdict in whole.verdicts] == [1, 2]
    assert whole.step == 4
    assert whole.seconds == whole.backbone_seconds == whole.head_seconds == whole.batch_tokens == 3
    assert [verdict.features for verdict in without_features(whole).verdicts] == [b"", b""]
    assert [verdict.computed_len for verdict in without_features(whole).verdicts] == [9, 9]
