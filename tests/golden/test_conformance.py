"""Our drafters against the public implementations that they follow, in fp32.

Recorded from deepseek-ai/DeepSpec afdfa7c (DSpark with each head, DFlash whose anchor predicts,
EAGLE-3), z-lab/dflash 44947fb (DFlash whose anchor predicts nothing), z-lab/dflash 1012959
(DFlash 2, attention windows) and sgl-project/SpecForge a6b6b02 (EAGLE-3 without query and key
norms, over a draft vocabulary): `conformance/cases.json` says which case comes from where, and its
shape.

Weights and sequences are those that `tests.support.conformance` draws from a case's seed. Each
implementation's own decoding loop ran against a target that taps what was drawn for each position,
keeps a given number of drafts in each round and goes on with the token that was drawn; SpecForge
has no such loop, so its training-time steps were taken one by one, over the whole sequence in each
round. Kept are, of every round, the normed hidden rows, the drafts and the confidences, and of the
sampled runs the draft distribution of each position, given the drafts before it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.modeling.drafters.interface import Drafter, OpenBlocks, teacher_forced
from dspark.modeling.drafters.served import serve
from dspark.modeling.drafters.shared import SharedDraftParts
from tests.support.conformance import FOLDER, Case, Run, load_cases
from tests.support.drafters import block_logits, prefixes

CASES = load_cases()
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@dataclass(frozen=True)
class Recorded:
    """One run: R rounds of K drafts."""

    run: Run
    taps: Tensor  # [L, n * d]
    tokens: Tensor  # [L], the kept drafts among them
    hidden: Tensor  # [R, K, d]
    drafts: Tensor  # [R, K]
    confidence: Tensor | None  # [R, K]
    q: Tensor | None  # [R, K, V]

    @property
    def previous(self) -> Tensor:
        """[R, K]: the token before each draft."""
        return torch.cat((self.tokens[self.run.starts][:, None], self.drafts[:, :-1]), 1)


def recorded_runs(case: Case) -> Iterator[Recorded]:
    with np.load(FOLDER / f"{case.name}.npz") as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file}
    drafts_of_all, begin, sampled = arrays["drafts"].long(), 0, 0
    for index, run in enumerate(case.runs):
        taps, tokens = case.sequence(index)
        rounds = slice(begin, begin := begin + len(run.accepted))
        drafts = drafts_of_all[rounds]
        for start, kept, block in zip(run.starts, run.accepted, drafts, strict=True):
            tokens[start + 1 : start + 1 + kept] = block[:kept]
        q = None
        if run.temperature:
            q = arrays["q"][sampled : (sampled := sampled + len(run.accepted))]
        confidence = arrays["confidence"][rounds] if "confidence" in arrays else None
        yield Recorded(run, taps, tokens, arrays["hidden"][rounds], drafts, confidence, q)


def likeliest(model: Drafter, logits: Tensor) -> Tensor:
    """[..., U] -> target ids [...]."""
    columns = logits.argmax(-1)
    return columns if model.draft_vocab is None else model.draft_vocab.ids[columns]


@torch.no_grad()
def walk(
    model: Drafter, blocks: OpenBlocks, anchor: Tensor, drawn: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rows [K, d] and tokens [K] of a block, each token chosen before the next is thought of:
    greedily, or as ``drawn``."""
    head = model.sequential_head
    rows: list[Tensor] = []
    tokens: list[Tensor] = []
    previous, state = anchor, head.start(1)
    for k in range(model.config.block_size):
        if k == len(rows):
            rows += blocks.rows(previous).unbind(1)
        vectors, state = head.step(rows[k], previous, state)
        logits = head.combine(model.base_logits(rows[k]), vectors)
        previous = likeliest(model, logits) if drawn is None else drawn[k : k + 1]
        tokens.append(previous)
    return torch.cat(rows), torch.cat(tokens)


def check_confidence(model: Drafter, hidden: Tensor, recorded: Recorded) -> None:
    with torch.no_grad():
        logits = model.confidence(hidden, recorded.previous)
    assert (logits is None) is (recorded.confidence is None)
    if logits is not None:
        close(logits.sigmoid(), recorded.confidence, 1e-6)


def close(actual: Tensor, expected: Tensor | None, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@EVERY_CASE
def test_training_computes_what_the_reference_does(case: Case) -> None:
    model = case.drafter()
    for recorded in recorded_runs(case):
        positions = torch.tensor(recorded.run.starts)
        with torch.no_grad():
            features = model.fuse(recorded.taps[: positions[-1]])
            blocks = model.open_blocks(features, recorded.tokens, positions, case.config.block_size)
            hidden = teacher_forced(blocks, recorded.previous)
        close(hidden, recorded.hidden, 1e-5)
        check_confidence(model, hidden, recorded)
        with torch.no_grad():
            pairs = zip(hidden, recorded.previous, strict=True)
            logits = torch.stack([block_logits(model, *pair) for pair in pairs])
        if recorded.q is None:
            assert likeliest(model, logits).tolist() == recorded.drafts.tolist()
        else:
            close(logits.softmax(-1), recorded.q, 1e-5)


@EVERY_CASE
def test_serving_computes_what_the_reference_does(case: Case) -> None:
    """Round after round, over a context that grows by what was kept."""
    model = case.drafter()
    parts = SharedDraftParts.from_model(model, "fp32")
    served = serve(model, "fp32")
    for recorded in recorded_runs(case):
        context = served.new_context()
        hidden = []
        for index, start in enumerate(recorded.run.starts):
            new = slice(context.length, start)
            after = recorded.tokens[new.start + 1 : start + 1]
            served.extend([context], parts.fuse(recorded.taps[new]), after, [len(after)])
            anchor, drafts = recorded.tokens[start : start + 1], recorded.drafts[index]
            drawn = None if recorded.q is None else drafts
            rows, tokens = walk(model, served.open_blocks([context]), anchor, drawn)
            assert tokens.tolist() == drafts.tolist()
            hidden.append(rows)
        close(torch.stack(hidden), recorded.hidden, 1e-5)
        check_confidence(model, torch.stack(hidden), recorded)
        if recorded.q is not None:
            for rows, previous, q in zip(hidden, recorded.previous, recorded.q, strict=True):
                ones, no_cut = torch.ones(len(q)), torch.full((len(q),), -torch.inf)
                close(parts.q_row(prefixes(rows), prefixes(previous), ones, no_cut), q, 1e-5)
