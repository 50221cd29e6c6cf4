"""Sets of devices and lines of fields, as they are written and read back."""

import pickle

import pytest

from piper.errors import ConfigError
from piper.ir.devices import Devices, columns, interned, parse, show
from piper.ir.text_fields import BadLineError, flag, numbers, pairs, read_fields
from piper.plan.text import read_plans
from tests.chain import UNIT, chain


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 2), "0,2"),
        ((0, 1, 2, 3), "0-3"),
        ((0, 2, 4, 6), "0-6/2"),
        ((1, 4, 7), "1-7/3"),
        ((3, 2, 1), "3,2,1"),
        ((0, 1, 3), "0,1,3"),
    ],
)
def test_a_set_is_written_shortly_and_read_back(devices: Devices, text: str) -> None:
    assert show(devices) == text
    assert parse(text) == devices


def test_columns_go_across_groups() -> None:
    assert columns([(4, 5), (6, 7)]) == ((4, 6), (5, 7))


def test_a_field_may_be_given_once() -> None:
    readers = {"waits": numbers, "part": pairs, "dynamic": flag}
    assert read_fields(["waits=1 2", "part=MB=0 K=3", "dynamic=1"], readers) == {
        "waits": (1, 2),
        "part": (("MB", 0), ("K", 3)),
        "dynamic": True,
    }
    for words in (["waits=1", "waits=2"], ["frees=1"], ["dynamic=2"], ["waits=one"]):
        with pytest.raises(BadLineError):
            read_fields(words, readers)


def test_a_line_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"plan\.txt:2"):
        read_plans("plans  seed=1.0\nplans  seed=1.0  seed=1.0", source="plan.txt")


def test_the_phases_of_a_chain_cost_what_is_asked() -> None:
    chunk = chain(2, split_cost=(1, 3, 5)).chunks[1]
    cost = {phase: spec.flops // UNIT for phase, spec in chunk.phases.items()}
    assert cost == {"F": 1, "B": 8, "BI": 3, "BW": 5}


def test_equal_sets_of_devices_are_one_object() -> None:
    """It has the hash and the text of the plain tuple, and is one when it is read from a pickle."""
    plain = tuple(range(1000, 3000))
    kept = interned(plain)
    assert kept is interned(tuple(list(plain)))
    assert kept == plain and hash(kept) == hash(plain) and repr(kept) == repr(plain)
    assert {plain: 1}[kept] == 1
    copy = pickle.loads(pickle.dumps(kept))
    assert copy == plain and type(copy) is tuple
