"""Strategies in the published JSON form."""

from inspect import cleandoc
from pathlib import Path

import pytest

from piper import ConfigError, at, order, place, replicate, shard, split
from piper.directives.json import load_strategy, parse_strategy

PUBLISHED = """
[
  {"op": "place", "filter": {"PP": 0}, "devices": [0, 2], "stream": "pp"},
  {"op": "place", "filter": {"PP": 1}, "devices": [1, 3]},
  {"op": "replicate", "filter": {"PP": 0, "EP": "-"}, "devices": [0, 2], "reduce_stream": "dp", "bucket_size": 25,
   "shard_grads": true},
  {"op": "replicate", "filter": {"PP": 1}, "devices": [1, 3], "gather_stream": "ag", "shard_params": true},
  {"op": "shard", "filter": {"PP": 0, "EP": "*"}, "devices": [0, 2], "stream": "ep"},
  {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2},
  {"op": "order", "filters": [[{"PP": 0, "MB": 0, "PASS": "F"}],
                              [{"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "B"}],
                              {"PP": 0, "MB": 1, "PASS": "BI"}]}
]
"""


def test_the_published_form_says_the_same_as_python() -> None:
    assert parse_strategy(PUBLISHED) == [
        place(at(PP=0), [0, 2], stream="pp"),
        place(at(PP=1), [1, 3]),
        replicate(at(PP=0, EP=None), [0, 2], zero=2, bucket_mb=25, reduce_stream="dp"),
        replicate(at(PP=1), [1, 3], zero=3, gather_stream="ag"),
        shard(at(PP=0, EP="*"), [0, 2], stream="ep"),
        split(at(), axis="MB", parts=2),
        order(
            [
                [at(PP=0, MB=0, PASS="F")],
                [at(PP=0, MB=1, PASS="F"), at(PP=0, MB=0, PASS="B")],
                [at(PP=0, MB=1, PASS="BI")],
            ]
        ),
    ]


def test_ways_is_the_size_of_an_expert_group() -> None:
    entry = '{"op": "shard", "filter": {"EP": "*"}, "devices": [0, 1, 2, 3], "ways": 2, "stream": "ep"}'
    (read,) = parse_strategy(f"[{entry}]")
    assert read == shard(at(EP="*"), [0, 1, 2, 3], ways=2, stream="ep")
    assert getattr(read, "ways") == 2  # noqa: B009  directives share no such field


def test_the_highest_level_of_sharding_wins() -> None:
    flags = '"shard_optimizer": true, "shard_grads": true, "shard_params": true'
    entry = f'{{"op": "replicate", "filter": {{}}, "devices": [0, 1], {flags}}}'
    assert parse_strategy(f"[{entry}]") == [replicate(at(), [0, 1], zero=3)]
    assert parse_strategy(f"[{entry.replace('true', 'false')}]") == [replicate(at(), [0, 1], zero=0)]


def test_a_directive_knows_where_it_was_written() -> None:
    first, *_ = parse_strategy(PUBLISHED, source="paper.json")
    assert first.title(0) == "place #0 (paper.json[0])"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[\n{"op" "place"}]',
            """
            strategy:2: this is not JSON
              column: 7
              why:    Expecting ':' delimiter
              hint:   a strategy is a list of objects: [{"op": "place", "filter": {"PP": 0}, "devices": [0]}]
            """,
        ),
        (
            '{"op": "place"}',
            """
            strategy: a strategy is a list, not an object
              hint: put the directives in brackets: [{"op": "place", ...}]; or give a list for each length: {"4096": [...], "65536": [...]}
            """,
        ),
        (
            "[3]",
            """
            strategy[0]: a directive is an object, not a number
              hint: {"op": "place", ...}
            """,
        ),
        (
            '[{"filter": {}}]',
            """
            strategy[0]: it does not say which directive it is
              known: place, replicate, shard, split, order, remat, precision, protect, offload, average
              hint:  give it an "op"
            """,
        ),
        (
            '[{"op": "plaice"}]',
            """
            strategy[0]: there is no directive 'plaice'
              known: place, replicate, shard, split, order, remat, precision, protect, offload, average
              hint:  did you mean 'place'?
            """,
        ),
        (
            '[{"op": "place", "filter": {}, "devices": [0], "steam": "pp"}]',
            """
            strategy[0]: place has no key 'steam'
              known: filter, devices, stream
              hint:  did you mean 'stream'?
            """,
        ),
        (
            '[{"op": "place", "filter": {}}]',
            """
            strategy[0]: place needs the key 'devices'
              has:  op, filter
              hint: add 'devices'
            """,
        ),
        (
            '[{"op": "place", "filter": {}, "devices": 0}]',
            """
            strategy[0]: 'devices' is 0
              hint: 'devices' is a list of whole numbers
            """,
        ),
        (
            '[{"op": "place", "filter": [], "devices": [0]}]',
            """
            strategy[0]: 'filter' is []
              hint: 'filter' is an object such as {"PP": 0, "EP": "*", "PASS": "F"}
            """,
        ),
        (
            '[{"op": "place", "filter": {"PP": -1}, "devices": [0]}]',
            """
            strategy[0]: 'PP' is -1
              hint: 'PP' is a whole number from 0, several as [0, 2] or {"from": 0, "to": 4} (without 4), "*" for any or "-" for without
            """,
        ),
        (
            '[{"op": "place", "filter": {"PASS": "X"}, "devices": [0]}]',
            """
            strategy[0]: 'PASS' is "X"
              hint: 'PASS' is one of F, B, BI, BW, *
            """,
        ),
        (
            '[{"op": "place", "filter": {}, "devices": [0], "stream": 1}]',
            """
            strategy[0]: 'stream' is 1
              hint: 'stream' is a name in one word
            """,
        ),
        (
            '[{"op": "split", "filter": {}, "num_microbatches": 2, "dim_name": "M B"}]',
            """
            strategy[0]: 'dim_name' is "M B"
              hint: 'dim_name' is a name in one word
            """,
        ),
        (
            '[{"op": "replicate", "filter": {}, "devices": [0], "shard_params": 1}]',
            """
            strategy[0]: 'shard_params' is 1
              hint: 'shard_params' is true or false
            """,
        ),
        (
            '[{"op": "replicate", "filter": {}, "devices": [0], "bucket_size": "25"}]',
            """
            strategy[0]: 'bucket_size' is "25"
              hint: 'bucket_size' is a size in MiB above 0
            """,
        ),
        (
            '[{"op": "split", "filter": {}, "num_microbatches": 1.5}]',
            """
            strategy[0]: 'num_microbatches' is 1.5
              hint: 'num_microbatches' is a whole number from 1
            """,
        ),
        (
            '[{"op": "order", "filters": {}}]',
            """
            strategy[0]: 'filters' is {}
              hint: 'filters' is a list of groups, each a filter or a list of filters
            """,
        ),
    ],
)
def test_what_is_malformed_gets_one_message(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_strategy(text)
    assert str(error.value) == cleandoc(message)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_strategy(tmp_path / "none.json")
    assert str(error.value) == cleandoc(f"""
        {tmp_path}/none.json: the strategy cannot be read
          why:  No such file or directory
          hint: give the path of a JSON file
    """)


def test_several_indices_are_a_list_or_a_range() -> None:
    text = '[{"op": "place", "filter": {"LAYER": {"from": 0, "to": 4}, "MB": [0, 2]}, "devices": [0]}]'
    assert parse_strategy(text) == [place(at(LAYER=range(0, 4), MB=[0, 2]), [0])]


@pytest.mark.parametrize(
    "index",
    ["[]", "[0, -1]", "[0, true]", '{"from": 2, "to": 2}', '{"from": 0}', '{"from": 0, "to": 2, "by": 1}',
     '{"from": -1, "to": 2}'],
)  # fmt: skip
def test_several_indices_that_select_nothing(index: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_strategy(f'[{{"op": "place", "filter": {{"PP": {index}}}, "devices": [0]}}]')
    assert str(error.value) == cleandoc(f"""
        strategy[0]: 'PP' is {index}
          hint: 'PP' is a whole number from 0, several as [0, 2] or {{"from": 0, "to": 4}} (without 4), "*" for any or "-" for without
    """)
