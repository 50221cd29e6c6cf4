"""Every element of every parameter has one device that writes it down, and every device finds all it holds."""

from dataclasses import replace

import pytest

from piper.checkpoint.bucket_spans import (
    BucketSpan,
    buffers_of,
    held_buckets,
    owned_range,
    saved_buckets,
    saved_buffers,
    spans,
    within,
)
from piper.ir.ids import SlotId
from piper.ir.sharding import WHOLE, Comb, Sharding, combs, local_sizes, runs
from piper.plan.divided import Share
from piper.plan.plan import Bucket, Piece, Plan, Plans, Slot


def bucket(
    name: str, sizes: dict[str, int], devices: tuple[int, ...], sharding: Sharding = WHOLE, **fields: object
) -> Bucket:
    pieces, offset = [], 0
    for piece, size in sizes.items():
        pieces.append(
            Piece(
                name=piece, shape=(size,), offset=offset, shardings=() if sharding.ways == 1 else (sharding,)
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
EXPERTS = bucket("e", {"f": 6}, (0, 1, 2, 3), Sharding(dim=0, ways=2), groups=((0, 2), (1, 3)), zero=1)
TIED = [bucket("t@0", {"g": 4}, (0, 1), zero=2), bucket("t@1", {"g": 4}, (2, 3), zero=2)]
FULL = {"a": 5, "b": 2, "c": 4, "d": 9, "f": 12, "g": 4}


def test_every_element_is_written_once() -> None:
    made = plans(REPLICAS, SHARDS, EXPERTS, *TIED)
    written: dict[str, list[int]] = {name: [0] * size for name, size in FULL.items()}
    for device in range(4):
        for found in saved_buckets(made, device):
            for span in spans(found, device, *owned_range(found, device)):
                for element in range(span.start, span.start + span.length):
                    written[span.name][element] += 1
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
    found = spans(made, device, *owned_range(made, device))
    assert [(span.name, span.start, span.at, span.length) for span in found] == wanted


def test_what_is_divided_along_its_second_dimension_lies_in_several_runs() -> None:
    """Of 2 x 6 in three parts of 2 x 2, the second one: elements 2, 3 and 8, 9."""
    piece = Piece(name="w", shape=(2, 2), offset=5, shardings=(Sharding(dim=1, ways=3),))
    made = replace(bucket("c", {"v": 5}, (0, 1, 2)), groups=((0,), (1,), (2,)))
    made = replace(made, pieces=(piece,))
    assert spans(made, 1, 0, 9) == [BucketSpan(name="w", start=2, at=5, length=2, count=2, stride=6, step=2)]
    assert [(s.start, s.at, s.length) for s in spans(made, 2, 6, 8)] == [(5, 6, 1), (10, 7, 1)]


def test_a_device_holds_what_others_write() -> None:
    made = plans(REPLICAS, *TIED)
    assert [b.name for b in held_buckets(made, 2)] == ["r", "t@1"]
    assert [b.name for b in saved_buckets(made, 2)] == []
    assert [b.name for b in saved_buckets(made, 0)] == ["r", "t@0"]


def test_the_first_copy_of_a_buffer_is_written() -> None:
    made = plans(buffers={0: ["x.mean"], 1: ["x.mean", "y"], 2: ["y"]})
    assert [buffers_of(made, device) for device in range(3)] == [["x.mean"], ["x.mean", "y"], ["y"]]
    whole = Share(part=0, ways=1)
    shares = {device: dict.fromkeys(buffers_of(made, device), whole) for device in range(3)}
    assert [saved_buffers(shares, device) for device in range(3)] == [["x.mean"], ["y"], []]


def test_every_part_of_a_divided_buffer_is_written() -> None:
    shares = {device: {"scale": Share(part=device % 2, ways=2)} for device in range(4)}
    assert [saved_buffers(shares, device) for device in range(4)] == [["scale"], ["scale"], [], []]


def test_a_slice_along_the_second_dimension_is_one_comb() -> None:
    assert list(combs((4, 3), (Sharding(dim=1, ways=2),), 1)) == [
        Comb(here=0, there=3, length=3, count=4, here_step=3, there_step=6)
    ]
    blocks = (Sharding(dim=1, ways=2, blocks=2),)  # [2, 8] held as columns 0, 1, 4, 5 of each row
    assert list(combs((2, 4), blocks, 0)) == [
        Comb(here=0, there=0, length=2, count=2, here_step=4, there_step=8),
        Comb(here=2, there=4, length=2, count=2, here_step=4, there_step=8),
    ]
    assert list(combs((2, 3), (), 0)) == [Comb(here=0, there=0, length=6)]


@pytest.mark.parametrize(
    "shardings",
    [
        (Sharding(dim=0, ways=2),),
        (Sharding(dim=1, ways=2),),
        (Sharding(dim=1, ways=2, blocks=3),),
        (Sharding(dim=1, ways=2, zigzag=True),),
        (Sharding(dim=2, ways=2),),
        (Sharding(dim=0, ways=2), Sharding(dim=1, ways=2, stride=2)),
        (Sharding(dim=1, ways=2), Sharding(dim=2, ways=2, stride=2)),
        (Sharding(dim=0, ways=2, blocks=2), Sharding(dim=2, ways=2, stride=2)),
    ],
)
def test_combs_are_the_runs(shardings: tuple[Sharding, ...]) -> None:
    shape = local_sizes((8, 12, 4), shardings)
    for position in range(4):
        found = [
            (comb.here + i * comb.here_step, comb.there + i * comb.there_step, comb.length)
            for comb in combs(shape, shardings, position)
            for i in range(comb.count)
        ]
        assert sorted(found) == list(runs(shape, shardings, position))


def test_a_range_cuts_the_runs_at_its_ends() -> None:
    comb = Comb(here=0, there=100, length=4, count=5, here_step=4, there_step=10)
    assert list(within("w", 20, comb, 22, 35)) == [
        BucketSpan(name="w", start=110, at=24, length=4, count=2, stride=10, step=4),
        BucketSpan(name="w", start=102, at=22, length=2),
        BucketSpan(name="w", start=130, at=32, length=3),
    ]
    assert list(within("w", 20, comb, 25, 27)) == [BucketSpan(name="w", start=111, at=25, length=2)]
    assert list(within("w", 20, comb, 0, 20)) == list(within("w", 20, comb, 40, 99)) == []
    assert list(within("w", 20, comb, 0, 24)) == [BucketSpan(name="w", start=100, at=20, length=4)]
    assert list(within("w", 5, Comb(here=0, there=7, length=6), 8, 99)) == [
        BucketSpan(name="w", start=10, at=8, length=3)
    ]
