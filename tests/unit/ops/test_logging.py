"""One event, one line, with its fields."""

import logging

from dspark.ops.logging import KeyValueFormatter


def render(message: str, **extra: object) -> str:
    record = logging.makeLogRecord({"levelname": "INFO", "msg": message, **extra})
    return KeyValueFormatter("drafter").format(record)


def test_fields_follow_the_message() -> None:
    line = render("drafter attached", port=8001, seconds=0.1234567, name_="a b", empty="")
    assert line.endswith(
        'info drafter drafter attached port=8001 seconds=0.123457 name_="a b" empty=""'
    )


def test_a_traceback_stays_on_the_line() -> None:
    try:
        raise ValueError("broken\nbadly")
    except ValueError as error:
        line = render("crashed", exc_info=(type(error), error, error.__traceback__))
    assert "\n" not in line
    assert "ValueError: broken" in line
