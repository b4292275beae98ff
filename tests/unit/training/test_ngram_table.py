import numpy as np

from dspark.training.ngram_table import UNKNOWN, NgramTable


def table(*texts: list[int], masked: int = 0) -> NgramTable:
    return NgramTable.fit((np.array(text), np.arange(len(text)) >= masked) for text in texts)


def predict(of: NgramTable, *context: int) -> int:
    return int(of.predict(np.array([context]))[0])


def test_the_longest_known_context_wins_and_the_rest_backs_off() -> None:
    known = table([1, 2, 3, 4], [9, 3, 5], [8, 3, 5])
    assert predict(known, 1, 2, 3) == 4
    assert predict(known, 7, 9, 3) == 5  # (9, 3)
    assert predict(known, 7, 7, 3) == 5  # 3 alone: 5 twice, 4 once
    assert predict(known, 1, 2, 42) == UNKNOWN


def test_ties_go_to_the_smaller_id() -> None:
    assert predict(table([1, 7], [1, 5]), UNKNOWN, UNKNOWN, 1) == 5


def test_only_successors_on_the_mask_are_learned() -> None:
    known = table([1, 2, 3, 4], masked=2)
    assert predict(known, UNKNOWN, UNKNOWN, 1) == UNKNOWN
    assert predict(known, UNKNOWN, 1, 2) == 3


def test_a_block_continues_from_its_own_tokens() -> None:
    known = table([1, 2, 3, 4, 5, 6])
    drafted = known.draft(np.array([1, 2, 3, 9]), np.array([0, 2, 3]), 3)
    assert drafted.tolist() == [[2, 3, 4], [4, 5, 6], [UNKNOWN] * 3]


def test_large_vocabularies_do_not_collide() -> None:
    rng = np.random.default_rng(0)
    text = rng.permutation(200_000)
    known = table(text.tolist())
    drafted = known.draft(text, np.arange(0, len(text) - 3, 97), 2)
    assert (drafted == text[np.arange(0, len(text) - 3, 97)[:, None] + [1, 2]]).all()
