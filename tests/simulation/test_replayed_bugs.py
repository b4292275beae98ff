"""Defects that servers with speculative decoding have had in public, replayed on our engine: what a
block of several tokens does to stop strings, end tokens, length limits and usage."""

import pytest

from dspark.core.planner import FixedPlanner
from dspark.engine.request import FinishReason
from tests.support.world import EOS, Output, World, request, scripted_target

A, B, C, AB, BC, SPACE, GREATER, LESS, ARROWS = range(9)
BLOCK = 7
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def world(output: list[int], *, accuracy: float = 1.0) -> World:
    """A target that says `output`, and a drafter that is right: whole blocks are accepted."""
    return World(
        target=scripted_target(1, output),
        accuracy=accuracy,
        block_size=BLOCK,
        planner=FixedPlanner(BLOCK),
    )


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_nothing_follows_a_stop_string_inside_a_block(accuracy: float) -> None:
    decoded = world([A, B, ARROWS, C, A], accuracy=accuracy).decode(request(stop=("><",)))
    assert decoded == Output((A, B, ARROWS), "ab", STOP)


@pytest.mark.parametrize("stop", [("a", "c", "b"), ("b", "a", "c"), ("c", "b", "a")])
@pytest.mark.parametrize("output", [[SPACE, SPACE, B, C, A], [SPACE, SPACE, BC, A]])
def test_the_stop_string_that_comes_first_in_the_text_wins(
    stop: tuple[str, ...], output: list[int]
) -> None:
    decoded = world(output).decode(request(stop=stop))
    assert (decoded.text, decoded.finish) == ("  ", STOP)
    assert decoded.tokens == tuple(output[:3])


def test_a_stop_string_early_in_a_long_block_is_found() -> None:
    decoded = world([SPACE, A, B, C, *[SPACE] * 9]).decode(request(max_tokens=20, stop=("bc",)))
    assert decoded == Output((SPACE, A, B, C), " a", STOP)


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_a_stop_string_over_two_deltas_neither_leaks_nor_repeats(accuracy: float) -> None:
    decoding = world([A, GREATER, GREATER, LESS, B], accuracy=accuracy)
    assert decoding.decode(request(stop=("><",))) == Output((A, GREATER, GREATER, LESS), "a>", STOP)
    # Held back while it could still become the stop string, given out once it could not.
    decoding = world([A, GREATER, B, B], accuracy=0.0)
    key = decoding.engine.add(request(max_tokens=4, stop=("><",)))
    decoding.run()
    assert [event.text for event in decoding.events[key]] == ["a", "", ">b", "b"]


@pytest.mark.parametrize(
    ("output", "max_tokens", "kept", "finish"),
    [
        ([A, B, C, SPACE, SPACE, SPACE], 5, 3, STOP),  # the stop comes before the cap
        ([A, B, C, SPACE], 3, 3, STOP),  # with the last token that the cap allows
        ([A, B, A, B, A, C, A], 5, 5, LENGTH),  # beyond it
    ],
)
def test_length_is_checked_after_every_other_end(
    output: list[int], max_tokens: int, kept: int, finish: FinishReason
) -> None:
    """Once with a stop token id, which never reaches the text, once with a stop string."""
    by_id = request(max_tokens=max_tokens, stop_token_ids=frozenset({C}))
    by_text = request(max_tokens=max_tokens, stop=("c",))
    for wanted in (by_id, by_text):
        decoded = world(output).decode(wanted)
        assert decoded.tokens == tuple(output[:kept])
        assert decoded.finish is finish
        assert "c" not in decoded.text


def test_an_end_token_near_the_cap_ends_there() -> None:
    decoded = world([A] * 8 + [EOS, A, A]).decode(request(max_tokens=10))
    assert (len(decoded.tokens), decoded.finish) == (9, STOP)


def test_an_end_token_inside_an_accepted_block_ends_the_output() -> None:
    decoding = world([A, B, EOS, A, A, A, A])
    key = decoding.engine.add(request(max_tokens=30))
    decoding.run()
    assert decoding.output(key) == Output((A, B, EOS), "ab", STOP)
    usage = decoding.events[key][-1].usage
    assert usage is not None
    assert (usage.admitted, usage.accepted) == (BLOCK, 2)  # what lies behind the end is not kept


@pytest.mark.parametrize("max_tokens", range(1, 13))
@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_exactly_max_tokens(max_tokens: int, accuracy: float) -> None:
    decoded = world([A, B, C], accuracy=accuracy).decode(request(max_tokens=max_tokens))
    assert (len(decoded.tokens), len(decoded.text)) == (max_tokens, max_tokens)
    assert decoded.finish is LENGTH


def test_the_batch_drains_with_joins_and_leaves_at_every_step() -> None:
    decoding = World(seed=3)
    wanted = {}
    for max_tokens in range(16, 0, -1):
        added = request([max_tokens % 5], max_tokens)
        wanted[decoding.engine.add(added)] = max_tokens
        decoding.step()
    decoding.run()
    for key, max_tokens in wanted.items():
        assert len(decoding.output(key).tokens) <= max_tokens
