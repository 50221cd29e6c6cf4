"""Every element of every parameter has one device that writes it down, and every device finds all it holds."""

from dataclasses import replace

import pytest

from piper.checkpoint.layout import buffers_of, held_buckets, owned_range, saved_buckets, saved_buffers, spans
from piper.ids import SlotId
from piper.plan.divided import Share
from piper.plan.plan import Bucket, Piece, Plan, Plans, Slot
from piper.sharding import WHOLE, Sharding


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
    assert [(s.start, s.at, s.length) for s in spans(made, 1, 0, 9)] == [(2, 5, 2), (8, 7, 2)]
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
