"""What each directive makes of the graph."""

from dataclasses import replace

import pytest

from piper.directives import Directive, apply, order, place, replicate, shard, split
from piper.ir.chunk_options import Policy
from piper.ir.graph import Graph, start
from piper.ir.ids import Pass
from piper.ir.mesh import EXPERTS
from piper.ir.select import at
from piper.ir.sharding import AxisPlacement, Shard
from tests.chain import chain


def after(*strategy: Directive, experts: int = 0) -> Graph:
    return apply(start(chain(2, experts=experts)), strategy)


def test_place_puts_nodes_on_devices() -> None:
    graph = after(place(at(), [0]), place(at(PP=1), [2, 1], stream="pp"))
    assert {name: node.devices for name, node in graph.nodes.items()} == {
        "F[PP=0]": (0,), "F[PP=1]": (2, 1), "B[PP=1]": (2, 1), "B[PP=0]": (0,),
    }  # fmt: skip
    assert graph.chosen(lambda options: options.transfer_stream) == {"PP=1": "pp"}
    assert graph.devices() == (0, 1, 2)


@pytest.mark.parametrize("devices", [3, [3], (3,), range(3, 4)])
def test_devices_come_in_many_forms(devices: list[int]) -> None:
    assert after(place(at(), devices)).devices() == (3,)


def test_a_later_place_wins() -> None:
    assert after(place(at(), [0]), place(at(), [1])).devices() == (1,)


def test_replicate_says_how_parameters_live() -> None:
    graph = after(replicate(at(PP=0), [0, 1], zero=3, bucket_mb=25, reduce_stream="r", gather_stream="g"))
    assert graph.policy("PP=0") == Policy(
        zero=3, bucket_mb=25, reduce_stream="r", gather_stream="g", origin=0
    )
    assert graph.policy("PP=1") == Policy()
    assert graph.nodes["B[PP=0]"].devices == (0, 1)


def test_shard_divides_experts_and_keeps_the_rest_of_the_policy() -> None:
    graph = after(
        replicate(at(), [0, 1, 2, 3], zero=2), shard(at(PP=0), range(4), ways=2, stream="ep"), experts=4
    )
    policy = Policy(zero=2, ways=2, exchange_stream="ep", origin=1)
    assert graph.policy("PP=0 EP=0 route") == graph.policy("PP=0 EP=0 unroute") == policy
    by_expert = {"experts.0.0": AxisPlacement(axis=EXPERTS, degree=2, placement=Shard(dim=0))}
    assert graph.policy("PP=0 EP=0") == replace(policy, by_expert=by_expert)
    assert graph.policy("PP=0").ways == 1


def test_shard_over_all_its_devices_by_default() -> None:
    assert after(shard(at(EP=0), [0, 1]), experts=4).policy("PP=0 EP=0").ways == 2


def test_a_later_replicate_undoes_a_shard() -> None:
    graph = after(shard(at(EP=0), [0, 1]), replicate(at(), [0, 1]), experts=4)
    assert graph.policy("PP=0 EP=0").ways == 1


def test_a_directive_is_noted_once_on_what_it_touches_twice() -> None:
    """An order by halves makes the halves, and then puts them in order."""
    graph = after(place(at(), [0]), order([[at(PP=0, PASS="BI")], [at(PP=0, PASS="BW")]]))
    assert graph.nodes["BI[PP=0]"].origin == (0, 1)
    assert graph.nodes["BW[PP=0]"].origin == (0, 1)
    assert graph.nodes["B[PP=1]"].origin == (0,)


def test_split_copies_everything_per_part() -> None:
    graph = after(split(at(), parts=2), split(at(), axis="K", parts=2))
    assert [name for name in graph.nodes if name.startswith("F[PP=0")] == [
        "F[PP=0 MB=0 K=0]", "F[PP=0 MB=0 K=1]", "F[PP=0 MB=1 K=0]", "F[PP=0 MB=1 K=1]",
    ]  # fmt: skip
    assert graph.parts["PP=0"] == (("MB", 2), ("K", 2))


def test_order_splits_a_backward_that_it_names_by_halves() -> None:
    graph = after(split(at(), parts=2), order([[at(PP=0, MB=0, PASS="F")], [at(PP=0, MB=0, PASS="BI")]]))
    assert [name for name in graph.nodes if "PP=0" in name] == [
        "F[PP=0 MB=0]", "F[PP=0 MB=1]", "BI[PP=0 MB=0]", "BW[PP=0 MB=0]", "B[PP=0 MB=1]",
    ]  # fmt: skip
    part = (("MB", 0),)
    assert graph.orderings[0].groups == (
        (Pass(chunk="PP=0", phase="F", part=part),),
        (Pass(chunk="PP=0", phase="BI", part=part),),
    )


def test_a_group_may_be_one_filter() -> None:
    assert order([at(PP=0), at(PP=1)]) == order([[at(PP=0)], [at(PP=1)]])


def test_a_directive_knows_where_it_was_written() -> None:
    directive = place(at(), [0])
    assert directive.source.startswith("test_directives.py:")
    assert directive.title(7) == f"place #7 ({directive.source})"
    assert directive == place(at(), [0])
