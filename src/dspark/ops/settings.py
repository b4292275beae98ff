"""Every setting of every service, in one schema.

A value comes from a flag (``--kv-tokens``), else the environment (``DSPARK_KV_TOKENS``), else a
TOML file (``--config`` or ``DSPARK_CONFIG``), else its default. Keys nobody knows are refused
wherever they come from: a typing error must not silently run the default. Only what Kubernetes
puts into the environment of every container, the addresses of its services, is passed over.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dspark.core.errors import ConfigError
from dspark.core.planner import parse_planner

ENV_PREFIX = "DSPARK_"

# NAME=value of the variables that announce a service called dspark or dspark-*.
_SERVICE_LINK = re.compile(
    rf"{ENV_PREFIX}(\w+_)?"
    r"(SERVICE_HOST=.*|SERVICE_PORT(_\w+)?=\d+|PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://.*"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*)"
)

Transport = Literal["grpc", "inproc"]


def _planner_name(text: str) -> str:
    try:
        return parse_planner(text).name
    except ConfigError as error:
        raise ValueError(str(error)) from None


PlannerName = Annotated[str, AfterValidator(_planner_name)]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1)]
Duration = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """The schema; descriptions are the documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # What is served
    target: str = Field(
        "smollm2-135m", description="target model: smollm2-135m, a folder or a Hugging Face id"
    )
    drafter: str = Field(
        "smollm2-135m-dspark",
        description="drafter checkpoint: a packaged name or a folder; ngram: prompt lookup alone; "
        "none: plain decoding",
    )
    lookup: bool = Field(
        True,
        description="beside a drafter, draft what followed the same words before, where that "
        "promises more (prompt lookup)",
    )
    served_model_name: str = Field("", description="model id in the API; empty: the target's name")
    precision: Literal["auto", "fp32", "bf16", "fp16w"] = Field(
        "auto", description="how weights are kept and multiplied (fp16w: fp16 weights, fp32 sums)"
    )
    threads: int = Field(0, ge=0, description="threads of each worker; 0: one per usable core")
    cache: Path = Field(
        Path("~/.cache/dspark"), description="folder of converted targets and cost profiles"
    )
    state: str = Field(
        "file", description="where cost profiles are kept: file (in the cache) or redis://HOST:PORT"
    )
    reprofile: bool = Field(
        False, description="measure what steps cost at start, even if a profile is kept already"
    )

    # Where
    transport: Transport = Field(
        "grpc", description="workers as processes of their own, or inside the scheduler"
    )
    host: str = Field("127.0.0.1", description="address every service listens on")
    port: Port = Field(8000, description="HTTP port of the scheduler; 0: any free one")
    drafter_port: Port = Field(8001, description="gRPC port of the drafter; 0: any free one")
    verifier_port: Port = Field(8002, description="gRPC port of the verifier; 0: any free one")
    drafter_endpoint: str = Field(
        "127.0.0.1:8001", description="where the scheduler finds the drafter"
    )
    verifier_endpoint: str = Field(
        "127.0.0.1:8002", description="where the scheduler finds the verifier"
    )

    # How steps are made
    planner: PlannerName = Field(
        "capacity",
        description="what is verified of a draft: capacity or causal (what pays), none (plain "
        "decoding), fixed:K (K tokens), threshold:S (tokens of survival S or more)",
    )
    cap_accept_every: int = Field(
        64,
        ge=0,
        description="steps from one to the next in which a few drafts are verified whole, to "
        "measure what trimming destroys and spares; 0: never",
    )
    kv_tokens: Count = Field(32768, description="tokens the KV cache holds")
    kv_block_size: Count = Field(16, description="tokens of a KV block")
    max_running: Count = Field(32, description="sequences decoded at once")
    max_waiting: Count = Field(256, description="requests queued before new ones get 503")
    default_max_tokens: Count = Field(
        1024, description="longest answer to a chat that names no limit; KV blocks are reserved"
    )
    max_prefill_tokens: Count = Field(256, description="prompt tokens processed in one step")
    max_batch_tokens: Count = Field(512, description="target rows of one step, drafts included")
    pausable: bool = Field(
        False,
        description="serve POST /pause and /resume: whoever reaches the port can then hold all "
        "steps, as benchmarks do",
    )
    max_body_bytes: Count = Field(4 * 2**20, description="largest HTTP request body")

    # How long to wait, in seconds
    draft_timeout: Duration = Field(
        2.0, description="longest wait for a draft before the step goes on without"
    )
    verify_timeout: Duration = Field(
        30.0, description="longest wait for one target step before it is sent again"
    )
    verifier_deadline: Duration = Field(
        60.0, description="longest absence of the verifier before its requests fail with 503"
    )
    startup_timeout: Duration = Field(
        900.0, description="longest wait for the verifier at start; includes a first download"
    )
    drafter_patience: Duration = Field(
        60.0, description="longest wait for the drafter at start before serving without it"
    )
    shutdown_grace: Duration = Field(
        10.0, description="longest wait for requests in flight when told to stop"
    )

    supervised: bool = Field(
        False, description="stop when stdin closes; dspark up sets it, so that nothing outlives it"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log lines that are written"
    )

    @property
    def model_name(self) -> str:
        """The model id clients see: a folder's last part, or the id the target was fetched by."""
        folder = Path(self.target).expanduser()
        return self.served_model_name or (folder.name if folder.is_dir() else self.target)

    @property
    def num_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def cache_dir(self) -> Path:
        return self.cache.expanduser()

    @property
    def has_drafter(self) -> bool:
        """Whether there is a drafter process; prompt lookup needs none."""
        return self.drafter not in ("none", "ngram")

    @property
    def has_lookup(self) -> bool:
        return self.drafter == "ngram" or (self.lookup and self.has_drafter)

    def to_environment(self) -> dict[str, str]:
        """The environment that makes another process load these very settings."""
        return {ENV_PREFIX + key.upper(): str(value) for key, value in self.model_dump().items()}


def load_settings(
    argv: Sequence[str] = (), environ: Mapping[str, str] = os.environ, *, program: str = "dspark"
) -> Settings:
    """Read flags, environment and file. ``--help`` prints the table of settings and exits.

    Raises:
        ConfigError: a key is unknown or a value is refused; the message names it and its source.
    """
    flags = _parse_flags(argv, program)
    environment = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and not _SERVICE_LINK.fullmatch(f"{name}={value}")
    }
    file = flags.pop("config", environment.pop("config", None))
    sources = {
        f"file {file}": _read_file(file) if file else {},
        "environment": environment,
        "flags": flags,
    }
    merged: dict[str, Any] = {}
    for source, values in sources.items():
        unknown = sorted(values.keys() - Settings.model_fields.keys())
        if unknown:
            raise ConfigError(f"unknown setting {', '.join(unknown)} in the {source}")
        merged |= values
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        source = [name for name, values in sources.items() if key in values][-1]
        raise ConfigError(
            f"setting {key} = {first['input']!r} (from the {source}) is refused: {first['msg']}"
        ) from None


def settings_table() -> list[tuple[str, str, str, str]]:
    """(flag, environment variable, default, meaning) of every setting, for help and docs."""
    return [
        (
            f"--{name.replace('_', '-')}",
            ENV_PREFIX + name.upper(),
            str(field.default),
            field.description or "",
        )
        for name, field in Settings.model_fields.items()
    ]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; --help lists the settings")


def _parse_flags(argv: Sequence[str], program: str) -> dict[str, Any]:
    parser = _Parser(prog=program, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    fields = Settings.model_fields.values()
    for field, (flag, variable, default, meaning) in zip(fields, settings_table(), strict=True):
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        parser.add_argument(flag, metavar="X", help=f"{meaning} [{variable}; {default}]", **alone)
    return vars(parser.parse_args(argv))


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as stream:
            return tomllib.load(stream)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"settings file {path} cannot be read: {error}") from error
