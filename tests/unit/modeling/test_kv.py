import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.errors import OutOfBlocksError
from dspark.modeling.kv import BlockPool

SALT = b"model"


def test_allocates_consecutive_blocks_if_there_are_any() -> None:
    pool = BlockPool(8, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(first)
    assert pool.allocate(3) == [4, 5, 6]
    assert second == [2, 3]
    assert pool.allocate(3) == [0, 1, 7]


def test_refuses_more_than_it_has_and_takes_nothing() -> None:
    pool = BlockPool(4, 4)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="3 KV blocks are needed and 2 are left"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(blocks)


def test_a_match_leaves_at_least_one_token_to_compute() -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(8))
    blocks = pool.allocate(2)
    pool.publish(tokens, SALT, blocks)
    assert pool.match(tokens, SALT) == blocks[:1]
    assert pool.match([*tokens, 9], SALT) == blocks
    assert pool.match(tokens[:4], SALT) == []


def test_a_match_depends_on_salt_and_on_all_tokens_before() -> None:
    pool = BlockPool(8, 2)
    pool.publish([1, 2, 3, 4], SALT, pool.allocate(2))
    assert pool.match([1, 2, 3, 4, 5], b"other") == []
    assert pool.match([0, 2, 3, 4, 5], SALT) == []  # the second block's own tokens are equal


def test_published_blocks_survive_their_owner_until_space_runs_out() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2)
    pool.publish([1, 2, 3, 4], SALT, blocks)
    pool.free(blocks)
    assert pool.num_free == 4
    assert pool.match([1, 2, 3, 4, 5], SALT) == blocks
    pool.free(blocks)
    pool.allocate(3)  # evicts one block: the end of the prefix goes first
    assert pool.match([1, 2, 3, 4, 5], SALT) == blocks[:1]


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1)
    pool.publish([1, 2], SALT, blocks)
    assert pool.match([1, 2, 3], SALT) == blocks
    pool.free(blocks)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_only_whole_blocks_can_be_published() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(ValueError, match="3 tokens do not fill 1 KV blocks"):
        pool.publish([1, 2, 3], SALT, pool.allocate(1))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=30), st.data())
def test_matched_blocks_hold_exactly_the_prefix(prompts: list[list[int]], data: st.DataObject):
    """Sequences come and go in a small pool; a shadow of every block's contents is kept, and what
    `match` returns must hold the prompt's own prefix. Nothing leaks."""
    size, num_blocks = 2, 12
    pool = BlockPool(num_blocks, size)
    contents: dict[int, tuple[int, ...]] = {}
    held: list[list[int]] = []
    for prompt in prompts:
        hits = pool.match(prompt, SALT)
        assert len(hits) * size < len(prompt)
        for place, block in enumerate(hits):
            assert contents[block] == tuple(prompt[: (place + 1) * size])
        try:
            own = pool.allocate(-(-len(prompt) // size) - len(hits))
        except OutOfBlocksError:
            pool.free(hits)
            for blocks in held:
                pool.free(blocks)
            held = []
            assert pool.num_free == num_blocks
            continue
        assert not set(own) & {block for blocks in held for block in blocks}
        blocks = [*hits, *own]
        full = len(prompt) // size
        for place in range(len(hits), full):
            contents[blocks[place]] = tuple(prompt[: (place + 1) * size])
        pool.publish(prompt[: full * size], SALT, blocks[:full])
        held.append(blocks)
        if data.draw(st.booleans()):
            pool.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
    for blocks in held:
        pool.free(blocks)
    assert pool.num_free == num_blocks


def test_tokens_of_any_integer_type_match() -> None:
    pool = BlockPool(2, 2)
    pool.publish(np.array([1, 2], dtype=np.int32), SALT, pool.allocate(1))
    assert len(pool.match([1, 2, 3], SALT)) == 1
