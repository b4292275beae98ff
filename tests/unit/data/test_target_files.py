import json
from pathlib import Path

import pytest

from dspark.core.errors import TargetError
from dspark.data.target_files import read_object, stop_ids

IDS = {"<end>": 7, "</s>": 2}


@pytest.mark.parametrize(
    ("listed", "own", "expected"),
    [
        ([2, 5], "<end>", {2, 5, 7}),
        (5, {"content": "</s>"}, {2, 5}),
        (None, None, set()),
        (None, "<gone>", set()),
    ],
)
def test_a_text_ends_at_what_is_listed_and_at_the_tokenizers_own_end(
    listed, own, expected, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": own}))
    assert stop_ids(tmp_path, IDS.get) == expected


def test_absent_files_say_nothing_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    assert stop_ids(tmp_path, IDS.get) == frozenset()
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(TargetError, match="not readable JSON"):
        read_object(tmp_path / "generation_config.json")
