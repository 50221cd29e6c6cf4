"""Plans of moves between layouts: each device gets its part once, and transfers that do not say so are refused."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import pytest

from piper.checkpoint.moves import MovedRuns, PlacedPiece, moving_plans, placed, prove_transfers, transfers
from piper.ir.sharding import Sharding, local_sizes
from piper.plan.bucket import Bucket
from piper.plan.updates import Piece
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import simulate

DEVICES = tuple(range(8))
SHAPE = (6, 8)


def bucket(zero: int, groups: list[tuple[int, ...]], *shardings: Sharding, name: str = "a") -> Bucket:
    """A bucket of a vector and a matrix, of which devices have slices."""
    matrix = local_sizes(SHAPE, shardings)
    pieces = (
        Piece(name="norm", shape=(5,), offset=0),
        Piece(name="weight", shape=matrix, offset=5, shardings=shardings),
    )
    return Bucket(
        name=name, devices=DEVICES, groups=tuple(groups), chunks=("a",), dtype="bfloat16", itemsize=2, zero=zero,
        pieces=pieces,
    )  # fmt: skip


def columns(ways: int) -> list[tuple[int, ...]]:
    return [tuple(range(place, 8, ways)) for place in range(ways)]


BUCKETS = {
    "zero 3": bucket(3, [DEVICES]),
    "zero 0": bucket(0, [DEVICES]),
    "zero 1": bucket(1, [DEVICES]),
    "zero 3 in groups": bucket(3, [DEVICES[:4], DEVICES[4:]]),
    "columns, zero 3": bucket(3, columns(2), Sharding(dim=1, degree=2)),
    "columns": bucket(0, columns(4), Sharding(dim=1, degree=4)),
    "rows, zero 2": bucket(2, columns(2), Sharding(dim=0, degree=2)),
    "both": bucket(3, columns(4), Sharding(dim=1, degree=2), Sharding(dim=0, degree=2, stride=2)),
}


def both(before: Bucket, after: Bucket, extent: str, name: str) -> tuple[PlacedPiece, PlacedPiece]:
    pieces = ({p.name: p for p in one.pieces}[name] for one in (before, after))
    return tuple(placed(b, p, extent) for b, p in zip((before, after), pieces, strict=True))  # type: ignore[return-value, arg-type]


@pytest.mark.parametrize("pair", [*permutations(BUCKETS, 2)], ids=" to ".join)
def test_every_element_arrives_where_it_is_needed(pair: tuple[str, str]) -> None:
    """The bytes are followed one by one: a device has the numbers of the elements of its part."""
    for extent in ("held", "owned"):
        for name in ("norm", "weight"):
            before, after = both(BUCKETS[pair[0]], BUCKETS[pair[1]], extent, name)
            having = {d: numbers(before, at) for at, d in enumerate(DEVICES)}
            got: dict[int, dict[int, int]] = {device: {} for device in DEVICES}
            for one in transfers(before, after):
                for run in one.runs:
                    for n in range(run.count):
                        for i in range(run.length):
                            here = run.here + n * run.here_step + i
                            got[one.target][run.there + n * run.there_step + i] = having[one.source][here]
            assert got == {d: numbers(after, at) for at, d in enumerate(DEVICES)}


def numbers(one: PlacedPiece, position: int) -> dict[int, int]:
    """Which element of the parameter is where in the bucket, on a device: by slicing a table of all."""
    if one.piece.shape == (5,):
        flat = [*range(5)]
    else:
        table = [[row * SHAPE[1] + column for column in range(SHAPE[1])] for row in range(SHAPE[0])]
        for cut in one.piece.shardings:
            sizes, index = (len(table), len(table[0])), cut.index(position)
            length = sizes[cut.dim] // cut.degree
            span = slice(index * length, (index + 1) * length)
            table = table[span] if cut.dim == 0 else [row[span] for row in table]
        flat = [element for row in table for element in row]
    low, high = one.ranges[position]
    places = ((one.piece.offset + i, element) for i, element in enumerate(flat))
    return {place: element for place, element in places if low <= place < high}


def test_what_a_device_has_does_not_travel() -> None:
    before, after = both(BUCKETS["zero 0"], BUCKETS["zero 3"], "owned", "weight")
    assert all(one.source == one.target for one in transfers(before, after))
    before, after = both(BUCKETS["zero 3 in groups"], BUCKETS["zero 0"], "held", "weight")
    assert {one.source // 4 == one.target // 4 for one in transfers(before, after)} == {True}


@pytest.mark.parametrize("fault", ["missing", "twice", "shifted", "wrong source", "wrong target"])
def test_a_wrong_transfer_is_refused(fault: str) -> None:
    before, after = both(BUCKETS["zero 3"], BUCKETS["columns, zero 3"], "owned", "weight")
    right = transfers(before, after)
    first, rest = right[0], right[1:]
    run = first.runs[0]
    wrong: Mapping[str, tuple[MovedRuns, ...]] = {
        "missing": rest,
        "twice": (first, *right),
        "shifted": (replace(first, runs=(replace(run, here=run.here + 1), *first.runs[1:])), *rest),
        "wrong source": (replace(first, source=(first.source + 1) % 8), *rest),
        "wrong target": (replace(first, target=(first.target + 1) % 8), *rest),
    }
    prove_transfers(before, after, right)
    with pytest.raises(AssertionError, match="elements than"):
        prove_transfers(before, after, wrong[fault])


def test_the_plan_of_a_move_is_priced_by_the_bytes_that_travel() -> None:
    """From replicas nothing travels; from shards to replicas each device gets all but its own."""
    costs = Roofline(load_cluster("h100"))
    one, other = ({"a": BUCKETS[name]} for name in ("zero 0", "zero 3"))
    there, back = (moving_plans(*pair, DEVICES, 8) for pair in ((one, other), (other, one)))
    assert [ins.nbytes for ins in there.plans[0].instrs] == [0]
    (ins,) = back.plans[0].instrs  # shards of 7 of 53 elements: 2 bytes of each are held, 10 owned
    assert ins.nbytes == 7 * 7 * 12 == (53 - 4) * 12
    assert simulate(back, None, costs).step > simulate(there, None, costs).step > 0
    assert moving_plans(one, one, DEVICES, 8).plans[0].instrs == ()
