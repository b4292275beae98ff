from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.modeling.drafters.checkpoint import load_drafter
from dspark.modeling.drafters.served import serve
from dspark.training import anchors
from dspark.training.held_out import (
    BLOCKS_AT_ONCE,
    draft_greedily,
    evaluate,
    greedy_accepted,
    greedy_rounds,
    walk,
)
from dspark.training.shards import CachedSequence, ResponseCache
from tests.support.drafters import block_logits
from tests.support.responses import write_responses
from tests.support.tiny import tiny_drafter


@pytest.fixture(scope="module")
def cache(toy_target: Path, tmp_path_factory: pytest.TempPathFactory) -> ResponseCache:
    folder = tmp_path_factory.mktemp("shards")
    write_responses(folder, toy_target, count=5, tap_layers=(0, 1))
    return ResponseCache(folder)


def candidates(sequence: CachedSequence) -> np.ndarray:
    return anchors.candidates(sequence.loss_mask.numpy().astype(bool))


def test_a_walk_goes_on_from_the_bonus_token() -> None:
    assert walk(np.array([2, 9, 9, 0, 1, 0])).tolist() == [0, 3, 4]


def test_a_perfect_drafter_commits_whole_blocks_and_never_more_than_the_response(
    cache: ResponseCache,
) -> None:
    sequence = cache[0]
    positions = candidates(sequence)
    padded = np.concatenate([sequence.ids.numpy(), np.full(4, -1)])
    perfect = padded[anchors.label_positions(positions, 4)]
    rounds = greedy_rounds(sequence, positions, perfect)
    assert rounds.committed.sum() == len(positions)  # every response token but the first
    assert rounds.committed.tolist() == [5, 5, 5, 4]
    assert rounds.countable.tolist() == [4, 4, 4, 4]


def test_a_draft_is_kept_up_to_its_first_error(cache: ResponseCache) -> None:
    sequence = cache[0]
    positions = candidates(sequence)[:1]
    drafted = sequence.ids.numpy()[anchors.label_positions(positions, 4)].copy()
    drafted[0, 2] = -1
    accepted, countable = greedy_accepted(sequence, positions, drafted)
    assert accepted.tolist() == [2]
    assert countable.tolist() == [4]


def test_only_greedy_responses_are_scored_by_domain_and_together(cache: ResponseCache) -> None:
    scores = evaluate(cache, lambda s, p: np.full((len(p), 3), -1), 3)
    assert set(scores) == {"code", "math", "all"}  # prompts 0, 2 and 4 are greedy
    assert scores["all"].rounds == scores["code"].rounds + scores["math"].rounds == 3 * 19
    assert scores["all"].accepted_length == 1.0
    assert scores["all"].acceptance == (0.0, 0.0, 0.0)


def test_blocks_are_those_of_the_serving_path(
    toy_target: Path, cache: ResponseCache, tmp_path: Path
) -> None:
    model = load_drafter(tiny_drafter(tmp_path, toy_target), toy_target)
    sequence = cache[1]
    positions = np.resize(candidates(sequence), BLOCKS_AT_ONCE + 3)  # more than one forward
    positions.sort()
    blocks = draft_greedily(model, sequence, positions)
    ids = sequence.ids.long()
    for row in (0, len(positions) - 1):
        anchor = int(positions[row])
        served = serve(model, "fp32")
        context = served.new_context()
        with torch.inference_mode():
            features = model.fuse(sequence.taps[:anchor].float())
            served.extend([context], features, ids[1 : anchor + 1], [anchor])
            hidden = served.open_blocks([context]).rows(ids[anchor, None])[0]
            previous = ids[anchor]
            for k, state in enumerate(hidden):
                confidence = model.confidence(state, previous)
                assert float(confidence) == pytest.approx(
                    float(blocks.confidence_logits[row, k]), abs=1e-4
                )
                logits = block_logits(model, state[None], previous[None])[0]
                previous = logits.argmax()  # the tiny drafter proposes the whole vocabulary
                assert int(previous) == blocks.tokens[row, k]
