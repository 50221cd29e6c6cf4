"""A strategy is written as JSON and as Python, and read back as it was."""

import json

import pytest

from piper import at, order, place, precision, remat, replicate, shard, split
from piper.directives import Directive
from piper.directives.json import parse_strategy, show_strategy

WRITTEN: list[tuple[Directive, dict[str, object]]] = [
    (place(at(PP=0), [0, 1]), {"op": "place", "filter": {"PP": 0}, "devices": [0, 1]}),
    (
        replicate(at(LAYER=range(0, 4)), [0, 1], zero=1, bucket_mb=25),
        {
            "op": "replicate",
            "filter": {"LAYER": {"from": 0, "to": 4}},
            "devices": [0, 1],
            "shard_optimizer": True,
            "bucket_size": 25,
        },
    ),
    (
        replicate(at(LAYER=[0, 2], EP=None), [3], zero=3),
        {"op": "replicate", "filter": {"EP": "-", "LAYER": [0, 2]}, "devices": [3], "shard_params": True},
    ),
    (
        shard(at(EP="*"), [0, 1], ways=2),
        {"op": "shard", "filter": {"EP": "*"}, "devices": [0, 1], "ways": 2},
    ),
    (
        shard(at(), [0, 1], axis="TP", weights={"*.up": 0, "*.down": 1}, between=1),
        {
            "op": "shard",
            "filter": {},
            "devices": [0, 1],
            "axis": "TP",
            "weights": {"*.up": 0, "*.down": 1},
            "between": 1,
        },
    ),
    (split(at(), parts=4), {"op": "split", "filter": {}, "num_microbatches": 4}),
    (
        order([[at(PP=0, MB=1, PASS="F")], [at(PP=1, MB=0, PASS="BI"), at(PP=0, MB=2, PASS="F")]]),
        {
            "op": "order",
            "filters": [
                [{"MB": 1, "PP": 0, "PASS": "F"}],
                [{"MB": 0, "PP": 1, "PASS": "BI"}, {"MB": 2, "PP": 0, "PASS": "F"}],
            ],
        },
    ),
    (
        remat(at(PP=0), 0.25, across="PP"),
        {"op": "remat", "filter": {"PP": 0}, "budget": 0.25, "across": "PP"},
    ),
    (precision(at(PP=0), "fp8"), {"op": "precision", "filter": {"PP": 0}, "products": "fp8"}),
]


@pytest.mark.parametrize(("directive", "entry"), WRITTEN, ids=[str(number) for number in range(len(WRITTEN))])
def test_a_directive_is_written_and_read_back(directive: Directive, entry: dict[str, object]) -> None:
    text = show_strategy([directive])
    assert json.loads(text) == [entry]
    assert parse_strategy(text) == [directive]


def test_a_strategy_has_one_directive_on_each_line() -> None:
    text = show_strategy([place(at(PP=0), [0]), split(at(), parts=2)])
    assert text == (
        "[\n"
        ' {"op": "place", "filter": {"PP": 0}, "devices": [0]},\n'
        ' {"op": "split", "filter": {}, "num_microbatches": 2}\n'
        "]\n"
    )


@pytest.mark.parametrize("directive", [directive for directive, _ in WRITTEN], ids=str)
def test_a_directive_prints_the_call_that_makes_it(directive: Directive) -> None:
    names = {"at": at, "order": order, "place": place, "remat": remat, "replicate": replicate}
    names |= {"precision": precision}
    assert eval(repr(directive), {**names, "shard": shard, "split": split}) == directive
