from dspark.core.types import RowStatus, SequenceKey, Verdict
from dspark.engine.request import FinishReason
from dspark.engine.sequence import Sequence
from tests.support.world import EOS, request

KEY = SequenceKey(1, 2)


def test_tokens_go_through_one_at_a_time_and_the_rest_of_a_block_is_dropped() -> None:
    sequence = Sequence(KEY, request((0, 0), 10), max_context=100)
    assert sequence.commit([1, 2]) == (1, 2)
    assert sequence.finish is None
    assert sequence.commit([1, EOS, 1, 1]) == (1, EOS)
    assert sequence.finish is FinishReason.STOP
    assert sequence.take_text() == "bcb"
    usage = sequence.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.steps) == (2, 4, 2)


def test_the_context_ends_the_output_like_max_tokens() -> None:
    sequence = Sequence(KEY, request((0, 0), 10), max_context=4)
    assert (sequence.max_len, sequence.remaining) == (4, 2)
    assert sequence.commit([1, 1, 1]) == (1, 1)
    assert sequence.finish is FinishReason.LENGTH


def test_an_incomplete_character_is_released_at_the_end() -> None:
    sequence = Sequence(KEY, request((0,), 2), max_context=100)
    sequence.commit([0, 9])
    assert sequence.take_text() == "a\ufffd"


def test_a_stop_string_that_only_the_flush_completes_is_a_stop() -> None:
    sequence = Sequence(KEY, request((0,), 2, stop=("\ufffd",)), max_context=100)
    sequence.commit([0, 9])
    assert (sequence.take_text(), sequence.finish) == ("a", FinishReason.STOP)


def test_reopening_keeps_what_is_committed_and_the_first_cache_hit() -> None:
    sequence = Sequence(KEY, request((0, 0, 0), 8), max_context=100)
    assert not sequence.decoding
    sequence.computed(Verdict(KEY, RowStatus.OK, 3, cached_len=2, features=b"fff"))
    sequence.commit([1])
    assert sequence.decoding
    sequence.draft_context.delivered(4)
    sequence.reopen()
    assert (sequence.pending, sequence.decoding) == (4, False)
    assert sequence.draft_context.committed_len == 0
    assert not sequence.draft_context.has_gap
    sequence.computed(Verdict(KEY, RowStatus.OK, 3, cached_len=3))
    assert sequence.decoding
    assert sequence.usage().cached_tokens == 2


def test_an_end_token_releases_what_waited_for_a_stop_string() -> None:
    sequence = Sequence(KEY, request((0,), 9, stop=("bz",)), max_context=100)
    sequence.commit([0, 1])
    assert sequence.take_text() == "a"
    sequence.commit([EOS])
    assert sequence.take_text() == "b"
