"""The text form of graphs."""

from inspect import cleandoc

import pytest

from piper import ConfigError, at, order, place, replicate, schedules, shard, split
from piper.directives import Directive, apply
from piper.ir.graph import start
from tests.chain import chain
from tests.ir.graph_text import read_graph, show_graph

COMPOSED: list[Directive] = [
    *(replicate(at(PP=s), [2 * r, 2 * r + 1], zero=3, bucket_mb=1.5) for s, r in enumerate([0, 1, 1, 0])),
    *(shard(at(PP=s, EP="*"), [2 * r, 2 * r + 1], stream="ep") for s, r in enumerate([0, 1, 1, 0])),
    split(at(), parts=4),
    *schedules.dualpipe_v(2, 4),
]


def test_a_small_graph_reads_well() -> None:
    strategy = [place(at(PP=0), [0, 1], stream="pp"), order([[at(PP=0, PASS="F")], [at(PP=0, PASS="BW")]])]
    shown = show_graph(apply(start(chain(1)), strategy))
    assert (
        shown
        == cleandoc(f"""
        directive  {strategy[0].title(0)}  verb=place  places=1
        directive  {strategy[1].title(1)}  verb=order  places=0
        chunk  PP=0  transfers=pp
        node  F[PP=0]  devices=0,1  stream=compute  origin=0 1
        node  BI[PP=0]  devices=0,1  stream=compute  origin=0 1
        node  BW[PP=0]  devices=0,1  stream=compute  origin=0 1
        order  1  F[PP=0] | BW[PP=0]
    """)
        + "\n"
    )


@pytest.mark.parametrize("strategy", [[], COMPOSED])
def test_graphs_survive_their_text(strategy: list[Directive]) -> None:
    outline = chain(4, experts=4, tied=True)
    graph = apply(start(outline), strategy)
    again = read_graph(show_graph(graph), outline)
    for part in ("nodes", "parts", "policies", "transfer_streams", "orderings", "directives"):
        assert getattr(again, part) == getattr(graph, part)
    assert again.index.tags == graph.index.tags
    assert again.select(at(PP=3, PASS="F")) == graph.select(at(PP=3, PASS="F"))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("node  F(PP=0)  devices=0", "'F(PP=0)' is not a node such as F[PP=0][MB=1]"),
        ("node  F[PP=7]  devices=0", "the model has no chunk 'PP=7'"),
        (
            "chunk  PP=0  zero=three",
            "'zero=three' cannot be read: invalid literal for int() with base 10: 'three'",
        ),
        ("edge  a", "'edge' begins no line here"),
    ],
)
def test_a_bad_line_is_named(line: str, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_graph(line, chain(1), source="graph.txt")
    assert str(error.value) == cleandoc(f"""
        graph.txt:1: this line cannot be read
          line: {line}
          why:  {why}
          hint: use the text as `show_graph` writes it, and the same model
    """)


def test_text_of_another_model() -> None:
    with pytest.raises(ConfigError) as error:
        read_graph("chunk  PP=0", chain(2), source="graph.txt")
    assert str(error.value) == cleandoc("""
        graph.txt: the text does not speak of PP=1
          chunks: PP=1
          hint:   use the text as `show_graph` writes it, and the same model
    """)
