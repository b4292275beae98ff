"""What is in the box loads; what is not is one clear sentence."""

import tomllib
from pathlib import Path

import pytest

from dspark.core.cost import ProfileKey
from dspark.core.errors import ConfigError
from dspark.sim.presets import load_cost, load_workload
from tests.support.workloads import step_cost

PRESETS = Path(load_workload.__code__.co_filename).parent
CARDS, MODELS = (tomllib.loads((PRESETS / f"{n}.toml").read_text()) for n in ("cards", "models"))


@pytest.mark.parametrize("name", [file.stem for file in (PRESETS / "workloads").glob("*.toml")])
def test_every_workload_loads_and_says_where_it_comes_from(name: str) -> None:
    assert {domain.name for domain in load_workload(name).domains} == {"math", "code", "chat"}
    assert len(load_workload(name).source) > 40


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", MODELS)
def test_every_card_runs_every_model(card: str, model: str) -> None:
    cost = load_cost(f"{card}:{model}", 7)
    assert 1e-3 < float(cost.verify_seconds(1, 1, 100)) < 1.0
    assert cost.draft_seconds(1) < float(cost.verify_seconds(1, 1, 100))


def test_a_machine_can_be_described_in_a_file(tmp_path: Path) -> None:
    described = tmp_path / "mine.toml"
    lines = ["[card]", *_lines(CARDS["l4"]), "[model]", *_lines(MODELS["qwen3-4b"])]
    described.write_text("\n".join(lines))
    assert load_cost(str(described), 7) == load_cost("l4:qwen3-4b", 7)


def test_a_measured_profile_is_taken_whatever_it_was_measured_for(tmp_path: Path) -> None:
    profile = tmp_path / "cost.json"
    profile.write_text(step_cost().to_json(ProfileKey("t", "d", "cpu", "fp32", 2)))
    assert load_cost(str(profile), 1) == step_cost()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("h100", None, "CARD:MODEL"),
        ("h100:gpt", None, "one of"),
        ("missing.toml", None, "cannot be read"),
        ("missing.json", None, "cannot be read"),
        ("bad.toml", "[card", "not TOML"),
        ("empty.toml", "", r"\[card\] does not fit"),
        ("bad.json", "{}", "not a measured cost profile"),
    ],
)
def test_costs_that_do_not_exist(
    tmp_path: Path, name: str, content: str | None, match: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    path = str(tmp_path / name) if "." in name else name
    with pytest.raises(ConfigError, match=match):
        load_cost(path, 7)


def test_a_workload_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="qwen3-4b, smollm2"):
        load_workload("gpt")


def _lines(table: dict[str, object]) -> list[str]:
    return [f"{key} = {value}" for key, value in table.items()]
