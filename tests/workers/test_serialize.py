"""Typed messages: what is sent arrives as it was, and bytes from elsewhere build nothing but data."""

import json
import math
import os
import pickle
import random
import resource
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from piper.checkpoint.load import Done
from piper.checkpoint.save import RefusedError
from piper.compiler import compile
from piper.ir.devices import interned
from piper.ir.ids import Pass, SlotId, buffer_slot
from piper.plan.plan import Plans
from piper.runtime.setup import setup_of
from piper.workers.blame import Failure
from piper.workers.messages import (
    CODEC,
    SETUP,
    BatchSlice,
    pack_setup,
    unpack_setup,
)
from piper.workers.transport.serialize import HEADER, Codec, MessageError, share, shared
from tests.runtime.grid import Cell, job


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A class that another one names."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """A class of the codec."""

    inner: Inner | None = None
    slots: tuple[SlotId, ...] = ()
    many: dict[str, tuple[Inner, ...]] = field(default_factory=dict)


class Evil:
    """What a pickle can do when it is read."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was read",))


PLAIN = Codec()
SMALL = Codec((dict[SlotId, tuple[Outer, ...]],))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        0.1 + 0.2,
        math.inf,
        "text\n\u00e4\0",
        b"\x00\xff",
        [1, [2, ()]],
        (1, (2, [])),
        {("F[PP=0]", "PP=0.out0"): 1, 3: {"d": [[1, 2]], "T": None}},
        {1, 2},
        frozenset({"a"}),
        torch.float64,
        Outer(inner=Inner(number=1), many={"a": (Inner(number=2), Inner(number=3))}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values(value: object) -> None:
    got = SMALL.decode(SMALL.encode(value))
    assert got == value
    assert type(got) is type(value)


def test_slots_whose_text_does_not_show_all_of_them() -> None:
    first = buffer_slot("a").of_run(Pass(chunk="c", phase="F"))
    got = SMALL.decode(SMALL.encode({first: Outer(slots=(buffer_slot("b"), first))}))
    assert isinstance(got, dict)
    ((key, value),) = got.items()
    assert type(key) is SlotId and key.fields == first.fields
    assert [slot.fields for slot in value.slots] == [buffer_slot("b").fields, first.fields]


def test_nan_and_negative_zero() -> None:
    got = PLAIN.decode(PLAIN.encode([math.nan, -0.0]))
    assert isinstance(got, list)
    assert math.isnan(got[0])
    assert math.copysign(1, got[1]) == -1


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(dtype)
    got = PLAIN.decode(bytearray(PLAIN.encode({"a": [value, torch.arange(3), value]})))
    assert isinstance(got, dict)
    assert got["a"][0].dtype == dtype
    assert got["a"][0].shape == shape
    assert torch.equal(got["a"][2].to(torch.complex128), value.to(torch.complex128))
    assert got["a"][1].tolist() == [0, 1, 2]


def test_a_tensor_travels_without_its_storage_and_can_be_written() -> None:
    message = PLAIN.encode(torch.arange(100_000.0)[5:8])
    assert len(message) < 200
    got = PLAIN.decode(message)
    assert isinstance(got, Tensor)
    assert got.mul_(2).tolist() == [10, 12, 14]


def test_views_conjugates_and_parameters() -> None:
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    sent = [value.T, torch.tensor([1 + 2j]).conj(), nn.Parameter(value)]
    got = PLAIN.decode(PLAIN.encode(sent))
    assert isinstance(got, list)
    assert got[0].tolist() == [[1, 3], [2, 4]]
    assert got[1].tolist() == [1 - 2j]
    assert got[2].requires_grad and not got[0].requires_grad


def test_messages_of_a_run() -> None:
    rows = BatchSlice(samples=8, dtype=torch.int64, parts=((2, torch.tensor([5, 6])),))
    got = CODEC.decode(CODEC.encode(("step", {"x": rows})))
    assert isinstance(got, tuple)
    assert got[1]["x"][2:4].tolist() == [5, 6]
    failure = Failure(device=1, kind="late", what="CommError: ...", trace="...", place=3)
    assert CODEC.decode(CODEC.encode(failure)) == failure
    trail = {(Pass(phase="F", chunk="PP=0"), SlotId("param", "PP=0")): torch.ones(2)}
    assert repr(CODEC.decode(CODEC.encode(trail))) == repr(trail)
    refused = CODEC.decode(CODEC.encode(Done(refused=RefusedError("what", {"a": "b"}, "hint"))))
    assert isinstance(refused, Done) and refused.refused is not None
    assert (refused.refused.what, refused.refused.facts, refused.refused.hint) == ("what", {"a": "b"}, "hint")


def test_plans_travel_in_typed_form() -> None:
    setup = setup_of(compile(job(Cell(case="mlp", schedule="1f1b", dp=2, zero=2))))
    sent = pack_setup(setup)
    data, device, _ = cast("tuple[dict[str, object], str, bytes]", SETUP.decode(sent))
    assert isinstance(data["plans"], Plans)
    assert data["plans"] == setup.plans
    assert data["outline"] == setup.outline
    assert device == "cpu"
    got = unpack_setup(sent)
    assert got.plans == setup.plans and got.seed == setup.seed and got.device == setup.device


@pytest.mark.parametrize("value", [Inner(number=1), object(), lambda: 1, Evil(), range(3), {"a": Evil()}])
def test_what_a_codec_does_not_know_is_not_sent(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be sent in a message"):
        PLAIN.encode(value)


def message(tree: object, rest: bytes = b"") -> bytes:
    header = json.dumps(tree).encode()
    return HEADER.pack(len(header)) + header + rest


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 8,
        HEADER.pack(3) + b"{{{",
        pickle.dumps(Evil()),
        message({"c": ["os.system", ["true"]]}),
        message({"c": ["builtins.eval", ["1"]]}),
        message({"c": ["subprocess.Popen", [["true"]]]}),
        message({"c": [f"{__name__}.Evil", []]}),
        message({"c": [f"{__name__}.Inner", []]}),
        message({"c": [f"{__name__}.Inner", [1, 2]]}),
        message({"exec": ["1"]}),
        message({"t": [], "s": []}),
        message({}),
        message({"T": [8, "torch.float64", [2], False]}, b"\0" * 100),
        message({"T": [-8, "torch.float64", [1], False]}, b"\0" * 100),
        message({"T": [8, "torch.nn", [1], False]}, b"\0" * 100),
        message({"T": [10**12, "torch.float64", [1], False]}),
        message({"T": [8, "torch.int64", [1], True]}, b"\0" * 100),
        message({"b": 10}),
        message({"b": "x"}),
        message({"y": "torch.nn"}),
        message({"d": [[[1], 2]]}),
        HEADER.pack(200_000) + b"[" * 200_000,
    ],
)
def test_bytes_that_are_no_message(sent: bytes) -> None:
    with pytest.raises(MessageError):
        SMALL.decode(sent)


def test_damaged_messages_build_data_or_nothing() -> None:
    rng = random.Random(0)
    sent = CODEC.encode(
        ("step", {"x": BatchSlice(samples=4, dtype=torch.float32, parts=((0, torch.ones(4)),))})
    )
    refused = 0
    for _ in range(2000):
        damaged = bytearray(sent)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            CODEC.decode(damaged)
        except MessageError:
            refused += 1
    assert refused > 1000


def test_sets_of_devices_arrive_as_tuples() -> None:
    arrived = CODEC.decode(CODEC.encode({"devices": interned((0, 2, 4))}))
    assert arrived == {"devices": (0, 2, 4)}


def test_values_that_do_not_fit_leave_no_file_open() -> None:
    before, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            share({"weight": torch.ones(2**16)})
        whole = share({"weight": torch.ones(5)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert shared(whole)["weight"].tolist() == [1.0] * 5
    os.close(whole)
    assert os.listdir("/proc/self/fd") == before
