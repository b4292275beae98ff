import pytest

from dspark.core.errors import ConfigError
from dspark.ops.ports import listening_socket, place
from dspark.ops.settings import Settings, load_settings


def test_every_service_gets_a_port_of_its_own() -> None:
    settings = place(Settings())
    assert len({settings.port, settings.drafter_port, settings.verifier_port}) == 3
    assert settings.drafter_endpoint == f"{settings.host}:{settings.drafter_port}"
    assert settings.verifier_endpoint == f"{settings.host}:{settings.verifier_port}"


def test_the_default_port_gives_way_to_the_next_free_one() -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        listener.listen()
        taken = listener.getsockname()[1]
        # As a default, not asked for: model_copy leaves the field out of model_fields_set.
        settings = Settings.model_construct(_fields_set=set(), **dict(Settings()) | {"port": taken})
        assert place(settings).port > taken


def test_a_port_that_was_asked_for_is_never_replaced() -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        listener.listen()
        taken = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=str(taken)):
            place(load_settings(["--port", str(taken)], {}))


def test_port_zero_asks_for_any() -> None:
    assert place(load_settings(["--port", "0"], {})).port > 0
