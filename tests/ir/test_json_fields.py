"""Dataclasses as JSON and back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from piper.ir.json_fields import from_json, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: float
    y: float = field(default=0.0, metadata={"key": "height"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    name: str
    points: tuple[Point, ...]
    pairs: tuple[tuple[str, int], ...] = ()
    by: Mapping[str, Mapping[str, Point]] = field(default_factory=dict)
    size: tuple[int, ...] | None = None
    flag: bool = False


WHOLE = Shape(
    name="a",
    points=(Point(x=1.0), Point(x=2.0, y=3.0)),
    pairs=(("MB", 0),),
    by={"k": {"F": Point(x=4.0)}},
    size=(2, 3),
    flag=True,
)


@pytest.mark.parametrize("shape", [WHOLE, Shape(name="b", points=())])
def test_what_is_written_is_read_back(shape: Shape) -> None:
    assert from_json(Shape, json.loads(json.dumps(to_json(shape)))) == shape


def test_a_record_may_be_a_list_of_its_first_fields_and_keys_of_no_field_are_ignored() -> None:
    found = from_json(Shape, {"name": "a", "points": [[1], [2, 3]], "newer": 5})
    assert found == Shape(name="a", points=(Point(x=1.0), Point(x=2.0, y=3.0)))
    assert all(type(point.x) is float for point in found.points)


def test_a_key_names_a_field_otherwise() -> None:
    assert to_json(Point(x=1.0, y=2.0)) == {"x": 1.0, "height": 2.0}


@pytest.mark.parametrize(
    ("data", "error", "why"),
    [
        ({"name": "a"}, KeyError, "'points'"),
        ({"name": "a", "points": [{"height": 1}]}, KeyError, "'x'"),
        ({"name": "a", "points": [7]}, TypeError, "Point is an object, not 7"),
        ({"name": "a", "points": [["far"]]}, ValueError, "could not convert string to float: 'far'"),
        ({"name": "a", "points": [], "pairs": [["MB"]]}, ValueError, "shorter than argument 1"),
        ("a", TypeError, "Shape is an object, not 'a'"),
    ],
)
def test_data_of_another_form_is_refused(data: object, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        from_json(Shape, data)
