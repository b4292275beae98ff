from itertools import combinations
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.modeling import attention_groups
from dspark.modeling.attention import attend
from dspark.modeling.attention_groups import Span
from dspark.modeling.attention_plan import Gather, Group, Slabs, plan_attention
from dspark.modeling.kv import KVCache, KVShape

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 8, 4, 96
SHAPE = KVShape(1, KV_HEADS, HEAD_DIM, NUM_BLOCKS, BLOCK_SIZE)


def run(
    cache: KVCache,
    spans: list[Span],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    padding: int = 0,
):
    """q: [B, H, hd]; k, v: [B, KV, hd]. Returns [B, H, hd]."""
    plan = plan_attention(spans, cache, HEADS // KV_HEADS, len(q) + padding)
    queries, keys_values = (
        torch.cat((rows, rows.new_full((padding, *rows.shape[1:]), 7.0)))
        for rows in (q, torch.cat((k, v), dim=1))
    )
    mixed = attend(plan, 0, queries, keys_values, HEAD_DIM**-0.5)
    assert len(mixed) == len(plan.positions) == len(q) + padding
    return mixed[: len(q)].view(q.shape)


def groups_of(cache: KVCache, spans: list[Span]) -> tuple[Group, ...]:
    num_rows = sum(span.length for span in spans)
    return plan_attention(spans, cache, HEADS // KV_HEADS, num_rows).groups


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """One sequence in fp64: q [n, H, hd] at positions start.., k and v [start + n, KV, hd]."""
    share = HEADS // KV_HEADS
    keys, values = (x.double().repeat_interleave(share, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * HEAD_DIM**-0.5
    hidden = torch.arange(len(k)) > (start + torch.arange(len(q)))[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6),
    layout=st.sampled_from(["scattered", "slabs", "runs"]),
    group_cost=st.sampled_from([0, 20, attention_groups._GROUP]),  # one for each width, or padding
    padding=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_every_row_sees_its_own_sequence_and_nothing_else(
    shapes: list[tuple[int, int]], layout: str, group_cost: int, padding: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(SHAPE, torch.float32)
    for tensor in cache.layers:
        tensor.normal_(generator=generator)  # whatever lies in other blocks must not matter
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables, taken = [], 0
    for place, (start, length) in enumerate(shapes):
        needed = -(-(start + length) // BLOCK_SIZE)
        if layout == "slabs":
            tables.append(range(place * 13, place * 13 + 13))
        elif layout == "runs":
            tables.append(list(range(taken, taken + needed)))
        else:
            tables.append(order[taken : taken + needed])
        taken += needed
    history = [
        torch.randn(2, start + length, KV_HEADS, HEAD_DIM, generator=generator)
        for start, length in shapes
    ]
    for table, (start, _), (k, v) in zip(tables, shapes, history, strict=True):
        if start:
            q = torch.zeros(start, HEADS, HEAD_DIM)
            run(cache, [Span(table, 0, start)], q, k[:start], v[:start])
    queries = [torch.randn(n, HEADS, HEAD_DIM, generator=generator) for _, n in shapes]
    spans = [Span(table, start, n) for table, (start, n) in zip(tables, shapes, strict=True)]
    new_k = torch.cat([k[start:] for (start, _), (k, _) in zip(shapes, history, strict=True)])
    new_v = torch.cat([v[start:] for (start, _), (_, v) in zip(shapes, history, strict=True)])
    with patch.object(attention_groups, "_GROUP", group_cost):
        got = run(cache, spans, torch.cat(queries), new_k, new_v, padding)
    expected = [
        reference(q, k, v, start)
        for q, (start, _), (k, v) in zip(queries, shapes, history, strict=True)
    ]
    torch.testing.assert_close(got.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_evenly_spaced_slabs_are_read_in_place() -> None:
    cache = KVCache(SHAPE, torch.float32)
    spans = [Span(range(i * 20, i * 20 + 20), 70, 1) for i in range(4)]
    (group,) = groups_of(cache, spans)
    assert group.context == Slabs(0, 20, 18)


def test_a_view_never_reaches_past_the_cache() -> None:
    """The last slab is short: read as long as its neighbour it would leave the tensor."""
    cache = KVCache(SHAPE, torch.float32)
    spans = [Span(range(48, 72), 90, 1), Span(range(92, 96), 10, 1)]
    for group in groups_of(cache, spans):
        if isinstance(group.context, Slabs):
            last = group.context.first_block + (group.num_spans - 1) * group.context.spacing
            assert last + group.context.num_blocks <= NUM_BLOCKS


def test_scattered_blocks_of_similar_length_share_one_gather() -> None:
    cache = KVCache(SHAPE, torch.float32)
    spans = [Span([i, i + 40, i + 20], 9 + i, 1) for i in range(3)]
    (group,) = groups_of(cache, spans)
    assert isinstance(group.context, Gather)
    assert group.num_spans == 3


@pytest.mark.parametrize(("longer", "num_groups"), [(60, 1), (1500, 2)])
def test_unequal_contexts_share_a_gather_unless_padding_costs_more_than_a_group(
    longer: int, num_groups: int
) -> None:
    cache = KVCache(KVShape(1, KV_HEADS, HEAD_DIM, 800, BLOCK_SIZE), torch.float32)
    spans = [
        Span(list(range(first, 800, 2)), context, 1)  # every other block: nothing to read in place
        for first, context in ((0, 20), (1, longer))
    ]
    assert len(groups_of(cache, spans)) == num_groups


def test_ragged_decode_rows_share_a_group_and_a_prompt_has_its_own() -> None:
    """As a planner that trims leaves them: a group for each length would cost more than padding."""
    cache = KVCache(KVShape(1, KV_HEADS, HEAD_DIM, 200, BLOCK_SIZE), torch.float32)
    lengths = (1, 5, 3, 13, 2)
    decoding = [Span(range(i * 25, i * 25 + 25), 80, n) for i, n in enumerate(lengths)]
    prompt = Span(range(125, 150), 0, 90)
    groups = groups_of(cache, [*decoding, prompt])
    assert sorted(group.num_spans for group in groups) == [1, 5]


@settings(deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 40)), min_size=1, max_size=7))
def test_no_other_widths_cost_less(shapes: list[tuple[int, int]]) -> None:
    spans = [Span((), start, length) for start, length in shapes]

    def cost(parts: list[list[Span]]) -> float:
        padded = sum(
            (max(s.length for s in part) - span.length) * (span.start + span.length)
            for part in parts
            for span in part
        )
        return attention_groups._GROUP * len(parts) + attention_groups._PADDED_READ * padded

    found = [[spans[i] for i in members] for members in attention_groups._widths(spans)]
    assert sorted(id(span) for part in found for span in part) == sorted(map(id, spans))
    falling = sorted(spans, key=lambda span: -span.length)
    inner = range(1, len(spans))
    cheapest = min(
        cost([falling[a:b] for a, b in zip((0, *cuts), (*cuts, len(spans)), strict=True)])
        for count in range(len(spans))
        for cuts in combinations(inner, count)
    )
    assert cost(found) == pytest.approx(cheapest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_in_span_order(dtype: torch.dtype) -> None:
    cache = KVCache(SHAPE, dtype)
    spans = [Span([i], 0, n) for i, n in enumerate((3, 1, 4, 2))]
    v = torch.arange(10, dtype=dtype)[:, None, None].expand(10, KV_HEADS, HEAD_DIM)
    first_of_span = [0, 3, 4, 8]
    zero = torch.zeros(10, HEADS, HEAD_DIM, dtype=dtype)
    got = run(cache, spans, zero, zero[:, :KV_HEADS], v)
    assert got[first_of_span, 0, 0].tolist() == [0, 3, 4, 8]  # a first token sees only itself
