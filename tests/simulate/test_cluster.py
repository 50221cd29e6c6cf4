"""Clusters: their files, and how long communication takes on them."""

from inspect import cleandoc
from pathlib import Path

import pytest

from piper.errors import ConfigError
from piper.simulate.cluster import Cluster, Link, known_clusters, load_cluster

SMALL = """
memory = 16e9
memory_bandwidth = 1e12
[flops]
float32 = 1e13
[[link]]
name = "inside"
devices = 4
bandwidth = 100e9
latency = 1e-6
[[link]]
name = "between"
bandwidth = 10e9
latency = 10e-6
"""


@pytest.fixture
def small(tmp_path: Path) -> Cluster:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return load_cluster(path)


def refusal(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    return str(caught.value)


def test_the_known_clusters_load() -> None:
    assert known_clusters() == ["a100", "b200", "cpu", "h100", "h200"]
    for name in known_clusters():
        cluster = load_cluster(name)
        assert cluster.name == name
        assert cluster.peak("float32") > 0
        assert cluster.seconds("all_reduce", 1e6, tuple(range(512))) > 0


def test_a_file_of_ones_own(small: Cluster) -> None:
    assert small.name == "small"
    assert small.links[0] == Link(name="inside", devices=4, bandwidth=100e9, latency=1e-6)
    assert (small.devices, small.cores, small.attained, small.launch) == (8, 0, 1.0, 0.0)


def test_a_type_without_a_peak_goes_as_float32(small: Cluster) -> None:
    assert small.peak("int8") == small.peak("float32") == 1e13


def test_a_message_takes_its_latency_and_its_bytes(small: Cluster) -> None:
    assert small.seconds("send", 1e9, (0, 1)) == pytest.approx(1e-6 + 0.01)
    assert small.seconds("send", 1e9, (3, 4)) == pytest.approx(10e-6 + 0.1)


def test_nobody_waits_alone(small: Cluster) -> None:
    assert small.seconds("all_reduce", 1e9, (5,)) == 0.0


def test_a_ring_between_nodes_uses_the_adapters_of_all_its_members(small: Cluster) -> None:
    one_each, all_of_both = (0, 4), tuple(range(8))
    assert small.bandwidth("all_reduce", one_each) == 10e9
    assert small.bandwidth("all_reduce", all_of_both) == 40e9


def test_of_an_exchange_only_the_share_for_other_nodes_crosses(small: Cluster) -> None:
    assert small.bandwidth("exchange", tuple(range(8))) == pytest.approx(10e9 * 7 / 4)


def test_a_shift_is_one_hop_of_which_all_crosses_through_one_adapter(small: Cluster) -> None:
    assert small.seconds("shift", 1e9, tuple(range(4))) == pytest.approx(1e-6 + 0.01)
    assert small.seconds("shift", 1e9, tuple(range(8))) == pytest.approx(10e-6 + 0.1)


def test_small_messages_take_a_tree(small: Cluster) -> None:
    assert small.latency("all_reduce", (0, 1)) == pytest.approx(2e-6)
    assert small.latency("gather", tuple(range(4))) == pytest.approx(3e-6)
    assert small.latency("all_reduce", tuple(range(256))) == pytest.approx(16 * 10e-6)


def test_an_unknown_cluster() -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster("b300")
    assert str(caught.value) == cleandoc("""
        --cluster: there is no cluster 'b300'
          known: a100, b200, cpu, h100, h200
          hint:  name one of these, or a TOML file; `piper profile --cluster-out FILE` writes one
    """)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("memory = 16e9", "memory ="), "TOMLDecodeError: Invalid value (at line 2, column 9)"),
        (("memory = 16e9", ""), "'memory' is missing"),
        (("memory = 16e9", 'memory = "big"'), "memory is 'big', not a positive number"),
        (("memory = 16e9", "memory = 16e9\nnodes = 3"), "nothing is called 'nodes'"),
        (("float32 = 1e13", "float32 = 0"), "flops.float32 is 0, not a positive number"),
        (("bandwidth = 10e9\n", ""), "link[1] (between) has no 'bandwidth'"),
        (('name = "between"\n', ""), "link[1] has no name"),
        (("latency = 1e-6", "latency = 1e-6\nwidth = 2"), "nothing of link[0] (inside) is called 'width'"),
        (("devices = 4\n", ""), "link[1] (between) joins no more devices than inside"),
    ],
)
def test_a_file_that_describes_no_cluster(tmp_path: Path, change: tuple[str, str], why: str) -> None:
    path = tmp_path / "bad.toml"
    assert refusal(path, SMALL.replace(*change, 1)) == "\n".join(
        [
            f"{path}: this file describes no cluster",
            f"  why:  {why}",
            "  hint: `piper profile --cluster-out FILE` writes one to start from; memory in bytes, times in seconds",
        ]
    )


def test_a_part_that_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    assert "why:  fragmentation is 1, which leaves nothing" in refusal(path, "fragmentation = 1.0\n" + SMALL)
    assert "why:  link[1].slows is 1.5, which leaves nothing" in refusal(path, SMALL + "slows = 1.5\n")


@pytest.mark.parametrize("name", known_clusters())
def test_groups_a_period_apart_cost_the_same(name: str) -> None:
    """A simulation prices one of them. Half a node further on a group lies otherwise in the network."""
    cluster = load_cluster(name)
    for group in ((0, 1, 2, 3), (6, 7, 8, 9), (0, 8, 16, 24), (0, 255, 256, 511), tuple(range(0, 1024, 64))):
        later = tuple(device + 3 * cluster.period for device in group)
        for op in ("reduce_scatter", "exchange", "send", "shift"):
            assert cluster.seconds(op, 2**20, group) == cluster.seconds(op, 2**20, later)
    if cluster.devices == 8:
        assert cluster.seconds("gather", 2**20, (0, 1, 2, 3)) < cluster.seconds("gather", 2**20, (6, 7, 8, 9))
