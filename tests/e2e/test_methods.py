"""Every kind of drafter, trained for a moment, drafts for real requests and changes nothing."""

from pathlib import Path

import pytest
from dspark_services.models import load_draft_worker, load_target_worker
from rich.console import Console

from dspark.core.planner import CapacityPlanner, FixedPlanner, Planner
from dspark.ops.settings import load_settings
from dspark.training.config import PRESETS, FitConfig
from dspark.training.export import export
from dspark.training.fit import fit
from tests.support.drafters import METHODS, TRAINED
from tests.support.system import Reference, collect, request, running_driver, until
from tests.support.workers import drafter_port, verifier_port

pytestmark = pytest.mark.timeout(120)

PROMPTS = [[index, (3 * index + 1) % 40, 7, 20 + index] * (1 + index % 3) for index in range(8)]
LENGTH = 40


@pytest.fixture(scope="module")
def expected(toy_target: Path) -> list[list[int]]:
    reference = Reference(toy_target)
    return [reference.tokens(prompt, LENGTH) for prompt in PROMPTS]


def trained(kind: str, target: Path, shards: Path, folder: Path) -> Path:
    fields = METHODS[kind]
    preset = {"markov_rank": 8, "num_hidden_layers": 1} | PRESETS[fields.get("method", "dspark")]
    chosen = {name: value for name, value in fields.items() if name != "conv_group_size"}
    config = FitConfig(
        **preset | chosen,
        data=str(shards),
        target=str(target),
        steps=60,
        target_layer_ids=(0,),
        draft_vocab_size=32,
        positions_per_step=64,
        num_anchors=4,
        threads=1,
    )
    assert fit(config, folder / "run", Console(quiet=True))
    export(folder / "run", folder / "drafter")
    return folder / "drafter"


@pytest.mark.parametrize("kind", TRAINED)
async def test_answers_stay_plain(
    kind: str, toy_target: Path, toy_shards: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    drafter = trained(kind, toy_target, toy_shards, tmp_path)
    flags = {"target": toy_target, "drafter": drafter, "precision": "fp32", "threads": 1}
    settings = load_settings([f"--{name}={value}" for name, value in flags.items()], {})
    planners: list[Planner] = [FixedPlanner(4), CapacityPlanner()]
    for planner in planners:
        async with (
            verifier_port("grpc", load_target_worker(settings), reply_timeout=30.0) as verifier,
            drafter_port("grpc", load_draft_worker(settings), reply_timeout=30.0) as worker,
            running_driver(verifier, worker, planner=planner, lookup=False) as (driver, recorder),
        ):
            await until(lambda: driver.status.drafter_ready)
            streams = [driver.submit(request(prompt, LENGTH)) for prompt in PROMPTS]
            assert [await collect(stream) for stream in streams] == expected
        assert recorder.fallbacks == []
        assert recorder.accepted > len(PROMPTS)
