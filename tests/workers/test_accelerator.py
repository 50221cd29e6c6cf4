"""Each worker of a machine sees one accelerator, which others may see too if there are not enough."""

import os
from dataclasses import replace

import pytest

from piper.errors import ConfigError
from piper.run.launch import launcher, place_of
from piper.runtime.worker import Options
from piper.workers.serve import crowded, name_as_machine, take_one
from tests.runtime.grid import Cell, compiled


@pytest.mark.parametrize(
    ("given", "local", "taken"), [("0", 0, "0"), ("0", 3, "0"), ("4,6", 1, "6"), ("4,6", 2, "4")]
)
def test_a_worker_takes_one_of_those_it_may_see(
    monkeypatch: pytest.MonkeyPatch, given: str, local: int, taken: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    take_one("cuda", local)

    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"  # each stream has a hardware queue of its own
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken


def test_more_workers_than_accelerators_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [crowded(workers) for workers in (1, 2, 3)] == [False, False, True]


def test_workers_of_one_accelerator_are_machines_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_MAX_P2P_NCHANNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_NCHANNELS_PER_NET_PEER", "2")
    name_as_machine(3, alone=False)
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    name_as_machine(2, alone=True)
    assert (os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"]) == ("device-2", "lo")
    assert os.environ["NCCL_NCHANNELS_PER_NET_PEER"] == "2"  # as the user has set it


def test_a_run_says_how_many_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    two = replace(compiled(Cell(case="mlp", schedule="1f1b")), device="cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert place_of(two, "local") == "local, 2 ranks on 1 GPU, through the host"
    assert place_of(two, "local", "nccl") == "local, 2 ranks on 1 GPU, by NCCL over sockets"
    assert place_of(two, "ray") == "ray"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert place_of(two, "local") == "local"


def test_another_way_to_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="share is host or nccl"):
        launcher(compiled(Cell(case="mlp", schedule="1f1b")), "local", Options(share="ncl"))
