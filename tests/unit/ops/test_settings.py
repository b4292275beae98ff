"""One schema, three sources, nothing unknown."""

from pathlib import Path

import pytest

from dspark.core.errors import ConfigError
from dspark.ops.settings import _SERVICE_LINK, Settings, load_settings, settings_table


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "dspark.toml"
    file.write_text("kv_tokens = 1000\nmax_running = 3\nport = 9\n")
    environ = {"DSPARK_CONFIG": str(file), "DSPARK_MAX_RUNNING": "4", "DSPARK_PORT": "10"}
    settings = load_settings(["--port", "11"], environ)
    assert (settings.kv_tokens, settings.max_running, settings.port) == (1000, 4, 11)
    assert settings.kv_block_size == Settings().kv_block_size


def test_the_config_flag_beats_the_config_variable(tmp_path: Path) -> None:
    for name, port in (("a", 1), ("b", 2)):
        (tmp_path / name).write_text(f"port = {port}")
    environ = {"DSPARK_CONFIG": str(tmp_path / "a")}
    assert load_settings(["--config", str(tmp_path / "b")], environ).port == 2


@pytest.mark.parametrize(
    ("argv", "environ", "complaint"),
    [
        (["--kv-token", "5"], {}, "--kv-token"),
        ([], {"DSPARK_KV_TOKEN": "5"}, "unknown setting kv_token in the environment"),
        (["--draft-timeout", "0"], {}, "draft_timeout"),
        (["--draft-timeout", "-1"], {}, "draft_timeout"),
        (["--verify-timeout", "inf"], {}, "verify_timeout"),
        (["--verify-timeout", "nan"], {}, "verify_timeout"),
        (["--planner", "fixed:0"], {}, "planner"),
        (["--planner", "greedy"], {}, "planner"),
        (["--port", "70000"], {}, "port"),
        (["--precision", "fp8"], {}, "precision"),
        ([], {"DSPARK_MAX_RUNNING": "many"}, "max_running = 'many' .from the environment."),
        (["--port"], {}, "--port"),
        (["--config", "no-such-file.toml"], {}, "no-such-file.toml"),
    ],
)
def test_bad_settings_are_refused_by_name(
    argv: list[str], environ: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_settings(argv, environ)


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "dspark.toml"
    file.write_text("kv_token = 5")
    with pytest.raises(ConfigError, match=r"unknown setting kv_token in the file .*dspark\.toml"):
        load_settings(["--config", str(file)], {})


def test_other_variables_are_left_alone() -> None:
    assert load_settings([], {"PATH": "/bin", "DSPARKLE": "1"}) == Settings()


KUBERNETES = {
    "DSPARK_VERIFIER_SERVICE_HOST": "10.0.0.1",
    "DSPARK_VERIFIER_SERVICE_PORT": "8002",
    "DSPARK_VERIFIER_SERVICE_PORT_GRPC": "8002",
    "DSPARK_VERIFIER_PORT": "tcp://10.0.0.1:8002",
    "DSPARK_VERIFIER_PORT_8002_TCP": "tcp://10.0.0.1:8002",
    "DSPARK_VERIFIER_PORT_8002_TCP_PROTO": "tcp",
    "DSPARK_VERIFIER_PORT_8002_TCP_PORT": "8002",
    "DSPARK_VERIFIER_PORT_8002_TCP_ADDR": "10.0.0.1",
    "DSPARK_PORT": "udp://10.0.0.2:53",
    "DSPARK_SERVICE_HOST": "10.0.0.2",
}


def test_service_links_are_passed_over() -> None:
    assert load_settings([], KUBERNETES) == Settings()
    assert load_settings([], KUBERNETES | {"DSPARK_VERIFIER_PORT": "9"}).verifier_port == 9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DSPARK_VERIFER_PORT", "8002"),
        ("DSPARK_PORT", "10.0.0.1:8002"),
        ("DSPARK_VERIFIER_SERVICE_HOSTS", "10.0.0.1"),
        ("DSPARK_VERIFIER_SERVICE_PORT", "tcp"),
        ("DSPARK_VERIFIER_PORT_TCP", "tcp://10.0.0.1:8002"),
        ("DSPARK_VERIFIER_ENDPOINTS", "tcp://10.0.0.1:8002"),
    ],
)
def test_what_only_resembles_a_service_link_is_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name.removeprefix("DSPARK_").lower()):
        load_settings([], {name: value})


def test_no_setting_is_named_like_a_service_link() -> None:
    environ = Settings().to_environment()
    assert not [name for name, value in environ.items() if _SERVICE_LINK.match(f"{name}={value}")]


def test_a_switch_needs_no_value() -> None:
    assert load_settings(["--reprofile", "--port=1"], {}).reprofile
    assert not load_settings(["--reprofile=false"], {"DSPARK_REPROFILE": "true"}).reprofile
    with pytest.raises(ConfigError, match="reprofile"):
        load_settings(["--reprofile=perhaps"], {})


def test_the_environment_form_loads_the_same_settings() -> None:
    settings = load_settings(["--planner", "fixed:3", "--threads", "2", "--cache", "/x y"], {})
    assert load_settings([], settings.to_environment()) == settings


def test_every_setting_is_documented() -> None:
    assert all(meaning for *_, meaning in settings_table())


@pytest.mark.parametrize(
    ("argv", "process", "lookup"),
    [
        ([], True, True),
        (["--lookup=false"], True, False),
        (["--drafter=ngram"], False, True),
        (["--drafter=ngram", "--lookup=false"], False, True),
        (["--drafter=none"], False, False),
    ],
)
def test_which_drafts_there_are(argv: list[str], process: bool, lookup: bool) -> None:
    settings = load_settings(argv, {})
    assert (settings.has_drafter, settings.has_lookup) == (process, lookup)
