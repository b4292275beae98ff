import pytest

from dspark.core.errors import ConfigError, InvalidRequestError
from dspark.core.types import SequenceKey
from dspark.engine.admission import Admission, Limits
from dspark.engine.sequence import Sequence
from tests.support.world import VOCAB_SIZE, request, target_info

TARGET = target_info(max_context=40, num_blocks=8, block_size=4)


def sequence(number: int, prompt_len: int, max_tokens: int) -> Sequence:
    wanted = request([0] * prompt_len, max_tokens)
    return Sequence(SequenceKey(0, number), wanted, TARGET.max_context)


def numbers(sequences: list[Sequence]) -> list[int]:
    return [sequence.key.sequence for sequence in sequences]


def test_slots_bound_how_many_run() -> None:
    admission = Admission(TARGET, max_running=2)
    waiting = [sequence(i, 1, 3) for i in range(3)]
    for each in waiting:
        admission.add(each)
    assert numbers(admission.admit()) == [0, 1]
    assert admission.admit() == []
    admission.release(waiting[0])
    assert numbers(admission.admit()) == [2]
    assert admission.num_waiting == 0


def test_blocks_are_reserved_for_the_whole_life_and_nobody_overtakes() -> None:
    admission = Admission(TARGET, max_running=9)
    large, larger, small = sequence(0, 10, 7), sequence(1, 10, 10), sequence(2, 1, 1)
    for each in (large, larger, small):
        admission.add(each)
    assert numbers(admission.admit()) == [0]  # 5 blocks of 8; the next needs 5 as well
    assert admission.free_blocks == 3
    assert admission.admit() == []
    admission.release(large)
    assert numbers(admission.admit()) == [1, 2]
    admission.release(larger)
    admission.release(small)
    assert admission.free_blocks == TARGET.num_blocks


def test_a_waiting_sequence_can_be_withdrawn() -> None:
    admission = Admission(TARGET, max_running=1)
    admission.add(sequence(0, 1, 1))
    admission.withdraw(SequenceKey(0, 0))
    admission.withdraw(SequenceKey(0, 0))
    assert admission.admit() == []


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [
        ([0] * 40, 1, "prompt"),
        ([0, VOCAB_SIZE], 1, "prompt"),
        ([-1], 1, "prompt"),
        ([0] * 10, 23, "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], max_tokens: int, param: str) -> None:
    wanted = Sequence(SequenceKey(0, 0), request(prompt, max_tokens), TARGET.max_context)
    with pytest.raises(InvalidRequestError) as caught:
        Admission(TARGET, 1).add(wanted)
    assert caught.value.param == param


def test_what_just_fits_is_taken() -> None:
    Admission(TARGET, 1).add(sequence(0, 10, 22))


@pytest.mark.parametrize("name", ["max_running", "max_prefill_tokens", "max_batch_tokens"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        Limits(**{name: 0})
