import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.errors import OutOfBlocksError
from dspark.modeling.kv import BlockPool, KVCache, KVShape

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


def test_a_run_is_worth_the_prefixes_that_were_used_longest_ago() -> None:
    pool = BlockPool(8, 2)
    sequences = [pool.allocate(4), pool.allocate(4)]
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    for blocks, tokens in zip(sequences, prompts, strict=True):
        pool.publish(tokens, SALT, blocks[:2])
        pool.free(blocks)
    pool.free(pool.match([*prompts[0], 9], SALT))  # now the second prompt is the older one
    assert pool.allocate(3) == [5, 6, 7]  # its last block goes first; 4 free ones are left
    assert pool.match([*prompts[0], 9], SALT) == [0, 1]
    assert pool.match([*prompts[1], 9], SALT) == [4]


def test_there_is_no_run_across_a_held_block() -> None:
    pool = BlockPool(5, 2)
    pool.allocate(2)
    middle = pool.allocate(1)
    pool.free([0, 1])
    assert middle == [2]
    assert pool.allocate_run(3) is None
    assert pool.num_free == 4  # nothing was taken
    assert pool.allocate_run(2) == [0, 1]
    assert pool.allocate(2) == [3, 4]


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


@pytest.mark.parametrize("features", [0, 3])
def test_blocks_are_copied_in_every_layer_with_their_features(features: int) -> None:
    cache = KVCache(KVShape(2, 1, 2, 6, 4), torch.float32, feature_dim=features)
    for tensor in (*cache.layers, *([] if cache.features is None else [cache.features])):
        tensor.normal_()
    before = [layer.clone() for layer in cache.layers]
    cache.copy_blocks([4, 1], [2, 3])
    for layer, old in zip(cache.layers, before, strict=True):
        assert torch.equal(layer[:, [2, 3]], old[:, [4, 1]])
        assert torch.equal(layer[:, [0, 1, 4, 5]], old[:, [0, 1, 4, 5]])
    if cache.features is not None:
        assert torch.equal(cache.features[[2, 3]], cache.features[[4, 1]])


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
