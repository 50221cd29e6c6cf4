"""Every element of every parameter has one device that writes it down, and every device finds all it holds."""

from dataclasses import replace

import pytest
import torch

from piper.checkpoint.bucket_spans import (
    saved_buckets,
    saved_buffers,
    spans,
    within,
)
from piper.ir.ids import SlotId
from piper.ir.sharding import UNSHARDED, FlatRuns, Sharding, flat_runs, local_sizes
from piper.plan.bucket import Bucket
from piper.plan.plan import Plan, Plans, Slot
from piper.plan.updates import Piece


def bucket(
    name: str,
    sizes: dict[str, int],
    devices: tuple[int, ...],
    sharding: Sharding = UNSHARDED,
    **fields: object,
) -> Bucket:
    pieces, offset = [], 0
    for piece, size in sizes.items():
        pieces.append(
            Piece(
                name=piece,
                shape=(size,),
                offset=offset,
                shardings=() if sharding.degree == 1 else (sharding,),
            )
        )
        offset += size
    made = Bucket(
        name=name,
        pieces=tuple(pieces),
        devices=devices,
        groups=(devices,),
        chunks=("PP=0",),
        dtype="float32",
        itemsize=4,
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def plans(*buckets: Bucket, buffers: dict[int, list[str]] | None = None) -> Plans:
    devices = sorted({device for b in buckets for device in b.devices} | set(buffers or {}))
    made = tuple(
        Plan(
            devices=(device,),
            instrs=(),
            slots={},
            residents={SlotId("buffer", name): Slot(nbytes=4) for name in (buffers or {}).get(device, [])},
        )
        for device in devices
    )
    return Plans(plans=made, comms={}, buckets={b.name: b for b in buckets}, seed=1.0, weighted=False)


REPLICAS = bucket("r", {"a": 5, "b": 2}, (0, 1, 2))
SHARDS = bucket("s", {"c": 4, "d": 9}, (0, 1, 2, 3), zero=3)
EXPERTS = bucket("e", {"f": 6}, (0, 1, 2, 3), Sharding(dim=0, degree=2), groups=((0, 2), (1, 3)), zero=1)
TIED = [bucket("t@0", {"g": 4}, (0, 1), zero=2), bucket("t@1", {"g": 4}, (2, 3), zero=2)]
FULL = {"a": 5, "b": 2, "c": 4, "d": 9, "f": 12, "g": 4}


def test_every_element_is_written_once() -> None:
    made = plans(REPLICAS, SHARDS, EXPERTS, *TIED)
    written: dict[str, list[int]] = {name: [0] * size for name, size in FULL.items()}
    for device in range(4):
        for found in saved_buckets(made, device):
            for name, held in spans(found, device, *found.owned(device)).items():
                for element in (runs.there + i for runs in held for i in range(runs.length)):
                    written[name][element] += 1
    assert written == {name: [1] * size for name, size in FULL.items()}


@pytest.mark.parametrize(
    ("made", "device", "wanted"),
    [
        (REPLICAS, 1, [("a", 0, 0, 5), ("b", 0, 5, 2)]),
        (SHARDS, 0, [("c", 0, 0, 4)]),  # 13 elements in shards of 4
        (SHARDS, 1, [("d", 0, 4, 4)]),
        (SHARDS, 3, [("d", 8, 12, 1)]),
        (EXPERTS, 3, [("f", 9, 3, 3)]),  # the second half of the experts, the second shard of it
    ],
)
def test_where_a_device_finds_what_it_owns(
    made: Bucket, device: int, wanted: list[tuple[str, int, int, int]]
) -> None:
    found = spans(made, device, *made.owned(device)).items()
    assert [(name, runs.there, runs.here, runs.length) for name, held in found for runs in held] == wanted


def test_what_is_divided_along_its_second_dimension_lies_in_several_runs() -> None:
    """Of 2 x 6 in three parts of 2 x 2, the second one: elements 2, 3 and 8, 9."""
    piece = Piece(name="w", shape=(2, 2), offset=5, shardings=(Sharding(dim=1, degree=3),))
    made = replace(bucket("c", {"v": 5}, (0, 1, 2)), groups=((0,), (1,), (2,)))
    made = replace(made, pieces=(piece,))
    second = FlatRuns(here=5, there=2, length=2, count=2, here_step=2, there_step=6)
    assert spans(made, 1, 0, 9) == {"w": [second]}
    cut = [FlatRuns(here=6, there=5, length=1), FlatRuns(here=7, there=10, length=1)]
    assert spans(made, 2, 6, 8) == {"w": cut}


def test_a_device_holds_what_others_write() -> None:
    made = plans(REPLICAS, *TIED)
    assert [b.name for b in made.buckets_on(2)] == ["r", "t@1"]
    assert [b.name for b in saved_buckets(made, 2)] == []
    assert [b.name for b in saved_buckets(made, 0)] == ["r", "t@0"]


def test_a_device_asks_only_its_own_buckets_how_they_are_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def update(self: Bucket) -> Bucket:
        asked.append(self.name)
        return self

    monkeypatch.setattr(Bucket, "update", property(update))
    made = plans(bucket("a", {"a": 4}, (0, 1)), bucket("b", {"b": 4}, (2, 3)))
    assert [b.name for b in saved_buckets(made, 2)] == ["b"]
    assert asked == ["b"]  # of thousands of devices, each would ask all buckets


def test_the_first_copy_of_a_buffer_is_written() -> None:
    made = plans(buffers={0: ["x.mean"], 1: ["x.mean", "y"], 2: ["y"]})
    assert [[*made.of(device).buffers] for device in range(3)] == [["x.mean"], ["x.mean", "y"], ["y"]]
    assert [saved_buffers(made, device) for device in range(3)] == [["x.mean"], ["y"], []]


def test_every_slice_of_a_sharded_buffer_is_written() -> None:
    halves = Slot(nbytes=4, sharding=Sharding(dim=0, degree=2), placed=(0, 1, 2, 3))
    plan = Plan(devices=(0, 1, 2, 3), instrs=(), slots={}, residents={SlotId("buffer", "scale"): halves})
    made = Plans(plans=(plan,), comms={}, buckets={}, seed=1.0, weighted=False)
    assert [saved_buffers(made, device) for device in range(4)] == [["scale"], ["scale"], [], []]


def test_a_slice_along_the_second_dimension_has_runs_at_equal_distances() -> None:
    assert list(flat_runs((4, 3), (Sharding(dim=1, degree=2),), 1)) == [
        FlatRuns(here=0, there=3, length=3, count=4, here_step=3, there_step=6)
    ]
    blocks = (Sharding(dim=1, degree=2, blocks=2),)  # [2, 8] held as columns 0, 1, 4, 5 of each row
    assert list(flat_runs((2, 4), blocks, 0)) == [
        FlatRuns(here=0, there=0, length=2, count=2, here_step=4, there_step=8),
        FlatRuns(here=2, there=4, length=2, count=2, here_step=4, there_step=8),
    ]
    assert list(flat_runs((2, 3), (), 0)) == [FlatRuns(here=0, there=0, length=6)]


@pytest.mark.parametrize(
    "shardings",
    [
        (Sharding(dim=0, degree=2),),
        (Sharding(dim=1, degree=2),),
        (Sharding(dim=1, degree=2, blocks=3),),
        (Sharding(dim=1, degree=2, zigzag=True),),
        (Sharding(dim=2, degree=2),),
        (Sharding(dim=0, degree=2), Sharding(dim=1, degree=2, stride=2)),
        (Sharding(dim=1, degree=2), Sharding(dim=2, degree=2, stride=2)),
        (Sharding(dim=0, degree=2, blocks=2), Sharding(dim=2, degree=2, stride=2)),
    ],
)
def test_flat_runs_are_the_elements_of_a_slice(shardings: tuple[Sharding, ...]) -> None:
    whole = torch.arange(8 * 12 * 4).view(8, 12, 4)
    for position in range(4):
        own = whole
        for held in shardings:
            pieces = held.degree * (2 if held.zigzag else 1)
            first = position // held.stride % held.degree
            kept = torch.tensor([first, pieces - 1 - first] if held.zigzag else [first])
            cut = own.unflatten(held.dim, (held.blocks, pieces, -1)).index_select(held.dim + 1, kept)
            own = cut.flatten(held.dim, held.dim + 2)
        assert local_sizes(whole.shape, shardings) == own.shape
        found = {
            runs.here + i * runs.here_step + j: runs.there + i * runs.there_step + j
            for runs in flat_runs(own.shape, shardings, position)
            for i in range(runs.count)
            for j in range(runs.length)
        }
        assert [found[i] for i in range(own.numel())] == own.flatten().tolist()


def test_a_range_cuts_the_runs_at_its_ends() -> None:
    comb = FlatRuns(here=0, there=100, length=4, count=5, here_step=4, there_step=10)
    assert list(within(20, comb, 22, 35)) == [
        FlatRuns(here=24, there=110, length=4, count=2, here_step=4, there_step=10),
        FlatRuns(here=22, there=102, length=2),
        FlatRuns(here=32, there=130, length=3),
    ]
    assert list(within(20, comb, 25, 27)) == [FlatRuns(here=25, there=111, length=2)]
    assert list(within(20, comb, 0, 20)) == list(within(20, comb, 40, 99)) == []
    assert list(within(20, comb, 0, 24)) == [FlatRuns(here=20, there=100, length=4)]
    assert list(within(5, FlatRuns(here=0, there=7, length=6), 8, 99)) == [
        FlatRuns(here=8, there=10, length=3)
    ]
