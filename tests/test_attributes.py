"""Attributes that are replaced for a while: what stands there afterwards."""

import pytest

from piper.process.attributes import replaced


class Base:
    @staticmethod
    def twice(number: int) -> int:
        return 2 * number

    def name(self) -> str:
        return "base"


class Derived(Base):
    pass


def test_what_a_class_defines_is_restored_as_it_was() -> None:
    before = vars(Base)["twice"]
    with pytest.raises(KeyError), replaced(Base, "twice", lambda number: 7):
        assert Base.twice(3) == 7
        raise KeyError
    assert vars(Base)["twice"] is before
    assert Base().twice(3) == 6


def test_what_a_class_inherits_stays_inherited() -> None:
    with replaced(Derived, "name", lambda self: "derived"):
        assert (Derived().name(), Base().name()) == ("derived", "base")
    assert "name" not in vars(Derived)
    assert Derived().name() == "base"


def test_an_attribute_that_is_not_there_is_not_added() -> None:
    with pytest.raises(AttributeError, match="renamed"), replaced(Base, "renamed", None):
        pass
    assert not hasattr(Base, "renamed")
