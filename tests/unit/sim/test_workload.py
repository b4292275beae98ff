"""Workloads read from files, and what they refuse."""

import numpy as np
import pytest

from dspark.core.errors import ConfigError
from dspark.sim.workload import Lengths, Workload
from tests.support.workloads import domain, workload

GOOD = """
source = "nowhere"
[domains.math]
acceptance = [0.9, 0.8]
auc = 0.8
prompt = { mean = 10, longest = 20 }
output = { mean = 5, longest = 50, sigma = 0.5 }
"""


def test_a_file_becomes_a_workload() -> None:
    read = Workload.from_toml("mine", GOOD)
    assert (read.name, read.source, read.block_size, read.longest) == ("mine", "nowhere", 2, 70)
    assert read.domains[0].output == Lengths(mean=5, longest=50, sigma=0.5)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("source = ", "source "),  # not TOML
        ("auc = 0.8", ""),
        ("auc = 0.8", "auc = 0.8\nspeed = 3"),
        ("auc = 0.8", "auc = 0.4"),
        ("[0.9, 0.8]", "[0.9, 1.0]"),
        ("[0.9, 0.8]", "[]"),
        ("[0.9, 0.8]", "0.9"),
        ("mean = 10", "mean = 21"),
        ("[domains.math]", "[other.math]"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_clear_sentence(was: str, becomes: str) -> None:
    with pytest.raises(ConfigError) as error:
        Workload.from_toml("mine", GOOD.replace(was, becomes))
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def test_all_domains_draft_blocks_of_one_size() -> None:
    with pytest.raises(ConfigError, match="same block size"):
        workload(domain("a", (0.5, 0.5)), domain("b", (0.5,)))


def test_lengths_have_the_mean_they_are_given() -> None:
    rng = np.random.default_rng(0)
    lengths = Lengths(mean=100, longest=10_000, sigma=0.6)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(100, rel=0.05)
    assert np.std(np.log(drawn)) == pytest.approx(0.6, rel=0.05)
    assert {Lengths(7, 7).draw(rng) for _ in range(20)} == {7}
    assert max(Lengths(50, 60, 2.0).draw(rng) for _ in range(200)) == 60
