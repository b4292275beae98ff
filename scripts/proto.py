"""Generate the gRPC stubs from proto/ into src/dspark/wire/. `make proto` runs it."""

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
STUBS = ROOT / "src" / "dspark" / "wire" / "dspark"
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
OUTPUTS = ("python", "grpc_python", "mypy", "mypy_grpc")


def generate() -> dict[Path, str]:
    """Return the text of every generated file by its path below ``STUBS``."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "protoc",
            f"--proto_path={PROTO}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            *(f"--plugin={plugin}={Path(sys.executable).parent / plugin}" for plugin in PLUGINS),
            *(f"--{output}_out=quiet:{scratch}" for output in OUTPUTS if "mypy" in output),
            *(f"--{output}_out={scratch}" for output in OUTPUTS if "mypy" not in output),
            *(str(path) for path in sorted(PROTO.rglob("*.proto"))),
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed; see its message above")
        root = Path(scratch) / "dspark"
        # protoc imports the stubs from the proto root; ours live inside the package.
        return {
            path.relative_to(root): path.read_text().replace(
                "from dspark.v1 import", "from dspark.wire.dspark.v1 import"
            )
            for path in sorted(root.rglob("*.py*"))
        }


def main() -> None:
    stubs = generate()
    for path, text in stubs.items():
        target = STUBS / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    sys.stdout.write(f"wrote {len(stubs)} files below {STUBS.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
