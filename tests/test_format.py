"""Numbers for people."""

import pytest

from piper.ir.format import count, percent, seconds, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 us"),
        (2.5e-7, "0.25 us"),
        (4.2e-5, "42 us"),
        (0.0238, "23.8 ms"),
        (1, "1 s"),
        (1234.5, "1234 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")]
)
def test_size(value: int, text: str) -> None:
    assert size(value) == text


def test_percent() -> None:
    assert percent(1, 8) == "12.5 %"
    assert percent(1, 0) == "0.0 %"


def test_count() -> None:
    assert [count(number, "device") for number in (0, 1, 2)] == ["0 devices", "1 device", "2 devices"]
