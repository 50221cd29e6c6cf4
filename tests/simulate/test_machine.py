"""A cluster measured on this machine, as a file."""

from pathlib import Path

import pytest

from piper.cli.machine import WIDTHS, measure, small_job, write_cluster
from piper.compiler import compile
from piper.errors import ConfigError
from piper.simulate.cluster import Cluster, Link, load_cluster

SMALL = Cluster(
    name="small",
    links=(Link(name="node", bandwidth=1e9, latency=1e-4),),
    flops={"float32": 1e10},
    memory=8e9,
    memory_bandwidth=1e10,
    launch=2e-5,
    devices=4,
    cores=2,
)


def test_a_cluster_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    write_cluster(SMALL, path)
    assert load_cluster(path) == SMALL


def test_a_cluster_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_cluster(SMALL, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: the cluster cannot be written\n"
        "  why:  Is a directory\n"
        "  hint: name a file in a folder that exists and that you own"
    )


def test_the_job_whose_communication_is_measured_sends_each_layer_by_itself() -> None:
    program = compile(small_job())
    sent = [ins.nbytes for ins in program.plans.plans[0].instrs if ins.op == "all_reduce"]
    assert sorted(sent) == [4 * width**2 for width in WIDTHS]


@pytest.mark.slow
def test_this_machine() -> None:
    found = measure()
    assert found.cores or found.devices
    assert 1e8 < found.flops["float32"] < 1e16
    assert 1e8 < found.memory_bandwidth < 1e14
    assert 1e6 < found.links[0].bandwidth < 1e13
    assert 0 <= found.links[0].latency < 1
