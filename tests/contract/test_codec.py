"""The committed stubs are what the proto files generate."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("proto_script", ROOT / "scripts" / "proto.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_stubs_match_the_proto_files() -> None:
    script = load_script()
    generated = script.generate()
    committed = {
        path.relative_to(script.STUBS): path.read_text()
        for path in script.STUBS.rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert committed == generated, "run `make proto` and commit the result"
