"""What a job runs on: as asked, or as there is."""

import pytest
import torch

from piper.errors import ConfigError
from piper.runtime.accelerator import KINDS, Kind, capturing, device_kind, device_of, pin, unpin

NONE = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_a_kind_that_nobody_knows() -> None:
    with pytest.raises(ConfigError) as caught:
        device_kind("tpu")
    assert str(caught.value) == "device: there is no device 'tpu'\n  hint: device is one of cpu, cuda"


@NONE
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(ConfigError) as caught:
        device_kind("cuda")
    built = f"torch {torch.__version__}" + ("" if torch.version.cuda else ", built without CUDA")
    assert str(caught.value) == (
        "device: there is no CUDA device here\n"
        f"  torch: {built}\n"
        "  hint:  use device cpu, or start where torch.cuda.is_available()"
    )


@NONE
def test_the_default_is_what_there_is() -> None:
    assert device_kind(None) == device_kind("cpu") == "cpu"


def test_every_worker_sees_its_accelerator_as_the_first() -> None:
    assert device_of("cuda") == torch.device("cuda:0")
    assert device_of("cpu") == torch.device("cpu")


def test_memory_of_the_host_is_pinned_as_each_kind_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    kind = Kind(
        title="XPU", visible="ZE_AFFINITY_MASK", cluster="h200", environment={},
        pin=lambda memory: pinned.append(memory.nbytes), unpin=lambda memory: pinned.remove(memory.nbytes),
    )  # fmt: skip
    monkeypatch.setitem(KINDS, "xpu", kind)
    monkeypatch.setitem(KINDS, "mps", Kind(title="MPS", visible="", cluster="h200", environment={}))
    memory = torch.empty(48, dtype=torch.uint8)
    for device in ("cpu", "mps", "xpu"):
        pin(memory, torch.device(device))
        pin(memory[:0], torch.device(device))
    assert pinned == [48]
    for device in ("cpu", "mps", "xpu"):
        unpin(memory, torch.device(device))
    assert pinned == []


def test_a_kind_without_graphs_captures_none() -> None:
    assert not capturing(torch.device("cpu"))
