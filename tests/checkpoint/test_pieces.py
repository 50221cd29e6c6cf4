"""Slices along any dimension are stored as few pieces and read back as slices of any other kind."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from piper.checkpoint.metadata import Record, SavedPiece, Spec, Stored, as_written, parse
from piper.checkpoint.save import buffer_parts
from piper.checkpoint.storage import (
    CheckpointReader,
    StorageError,
    TensorRange,
    covered,
    index_of,
    overlaps,
    write_blocks,
    write_parts,
)
from piper.ir.sharding import FlatRuns, Sharding, flat_runs, local_sizes
from piper.plan.plan import Slot

WHOLE = (6, 8)
DIVISIONS: dict[str, tuple[Sharding, ...]] = {
    "whole": (),
    "rows": (Sharding(dim=0, degree=2),),
    "columns": (Sharding(dim=1, degree=2),),
    "blocks": (Sharding(dim=1, degree=2, blocks=2),),
    "quarters": (Sharding(dim=1, degree=4),),
    "both": (Sharding(dim=0, degree=2), Sharding(dim=1, degree=2, stride=2)),
}


def devices(division: tuple[Sharding, ...]) -> int:
    return max((held.degree * held.stride for held in division), default=1)


def parts(flat: torch.Tensor, division: tuple[Sharding, ...], position: int) -> list[TensorRange]:
    """Return a device's slice as runs of the whole."""
    found = []
    for comb in flat_runs(local_sizes(WHOLE, division), division, position):
        runs = flat[comb.here :][: comb.length]
        if comb.count > 1:
            span = flat[comb.here :][: (comb.count - 1) * comb.here_step + comb.length]
            runs = span.unfold(0, comb.length, comb.here_step)
        found.append(
            TensorRange(key="model.w", size=48, start=comb.there, tensor=runs, stride=comb.there_step)
        )
    return found


def held(whole: torch.Tensor, division: tuple[Sharding, ...], position: int) -> torch.Tensor:
    """Return a device's slice of a matrix, taken dimension by dimension."""
    for one in division:
        cuts = whole.unflatten(one.dim, (one.blocks, one.degree, -1)).select(one.dim + 1, one.index(position))
        whole = cuts.flatten(one.dim, one.dim + 1)
    return whole


@pytest.mark.parametrize("saved", DIVISIONS)
@pytest.mark.parametrize("loaded", DIVISIONS)
def test_any_slices_are_read_from_any_others(saved: str, loaded: str, tmp_path: Path) -> None:
    whole = torch.arange(48.0).view(WHOLE)
    written = []
    for position in range(devices(DIVISIONS[saved])):
        flat = held(whole, DIVISIONS[saved], position).reshape(-1).clone()
        written.append(write_parts(tmp_path, f"device-{position}", parts(flat, DIVISIONS[saved], position)))
    record = Record(
        step=0,
        model={"w": Spec(shape=WHOLE)},
        tensors=index_of(one.placed for one in written),
        files={name: file for one in written for name, file in one.files.items()},
    )
    again = parse(Path("step"), record.to_json())
    assert again.tensors == record.tensors
    reader = CheckpointReader(tmp_path, again)
    for position in range(devices(DIVISIONS[loaded])):
        wanted = held(whole, DIVISIONS[loaded], position)
        flat = torch.zeros(wanted.numel(), dtype=torch.float64)
        reader.read(parts(flat, DIVISIONS[loaded], position))
        assert torch.equal(flat.view(wanted.shape), wanted.double())


def test_a_buffer_is_sharded_along_its_own_dimension(tmp_path: Path) -> None:
    whole = torch.arange(8.0).view(2, 4)
    halves = Slot(nbytes=16, sharding=Sharding(dim=1, degree=2), placed=(3, 4))
    written = []
    for part in range(2):
        mine = whole[:, 2 * part : 2 * part + 2].contiguous()
        own = buffer_parts("b", halves, 3 + part, mine, mine.view(-1))
        written.append(write_parts(tmp_path, f"device-{part}", own))
    record = Record(
        step=0,
        tensors=index_of(one.placed for one in written),
        files={name: file for one in written for name, file in one.files.items()},
    )
    flat = torch.zeros(8)
    CheckpointReader(tmp_path, record).read(buffer_parts("b", Slot(nbytes=32), 0, whole, flat))
    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    half = torch.zeros(4)
    CheckpointReader(tmp_path, record).read(buffer_parts("b", halves, 4, half.view(2, 2), half))
    assert half.tolist() == [2.0, 3.0, 6.0, 7.0]


@pytest.mark.parametrize("offsets", [[-8, 0], [8, 16], [8, 0]])
def test_a_tensor_that_its_header_puts_outside_the_file_is_refused(
    offsets: list[int], tmp_path: Path
) -> None:
    header = json.dumps({"model.w": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    file = write_blocks(tmp_path / "values.safetensors", [memoryview(content)])
    piece = SavedPiece(offset=0, length=2, file="values.safetensors")
    stored = Stored(dtype="float32", size=2, pieces=(piece,))
    record = Record(step=0, tensors={"model.w": stored}, files={piece.file: file})
    wanted = TensorRange(key="model.w", size=2, start=0, tensor=torch.zeros(2))
    with pytest.raises(StorageError, match=r"model\.w lies outside the file"):
        CheckpointReader(tmp_path, record).read([wanted])


def test_a_sharded_matrix_is_one_piece_on_each_device() -> None:
    flat = torch.zeros(4096 * 8)
    big = [
        TensorRange(
            key="w", size=4096 * 16, start=comb.there, tensor=flat.view(4096, 8), stride=comb.there_step
        )
        for comb in flat_runs((4096, 8), (Sharding(dim=1, degree=2),), 1)
    ]
    assert [part.lies("f") for part in big] == [
        SavedPiece(offset=8, length=8, file="f", count=4096, stride=16)
    ]
    assert as_written(big[0].lies("f")) == [8, 8, "f", 4096, 16]


PIECES = [
    SavedPiece(offset=0, length=24, file=""),
    SavedPiece(offset=3, length=15, file=""),
    SavedPiece(offset=0, length=4, file="", count=3, stride=8),  # 0-3, 8-11, 16-19
    SavedPiece(offset=4, length=4, file="", count=2, stride=8),
    SavedPiece(offset=6, length=5, file="", count=2, stride=8),  # 6-10, 14-18
    SavedPiece(offset=0, length=2, file="", count=4, stride=4),  # 0-1, 4-5, 8-9, 12-13
    SavedPiece(offset=1, length=7, file="", count=3, stride=8),
    SavedPiece(offset=5, length=0, file=""),
]


@pytest.mark.parametrize(("one", "other"), [*itertools.product(PIECES, PIECES)])
def test_what_two_pieces_have_in_common(one: SavedPiece, other: SavedPiece) -> None:
    here, there = (
        [piece.offset + run * piece.stride + i for run in range(piece.count) for i in range(piece.length)]
        for piece in (one, other)
    )
    pairs = [
        (runs.here + n * runs.here_step + i, runs.there + n * runs.there_step + i)
        for runs in overlaps(one, other)
        for n in range(runs.count)
        for i in range(runs.length)
    ]
    assert sorted(pairs) == [(here.index(e), there.index(e)) for e in sorted({*here} & {*there})]


def test_runs_at_equal_distances_stay_together() -> None:
    rows = PIECES[2]
    assert list(overlaps(rows, PIECES[0])) == [
        FlatRuns(here=0, there=0, length=4, count=3, here_step=4, there_step=8)
    ]
    assert list(overlaps(rows, PIECES[6])) == [
        FlatRuns(here=1, there=0, length=3, count=3, here_step=4, there_step=7)
    ]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (SavedPiece(offset=2, length=2, file="f", count=2, stride=4), None),
        (SavedPiece(offset=1, length=2, file="f", count=2, stride=4), "a gap or an overlap at element 2"),
        (SavedPiece(offset=2, length=2, file="f", count=2, stride=5), "a gap or an overlap at element 6"),
        (SavedPiece(offset=2, length=2, file="f"), "a tensor of 8 elements has 6 in its pieces"),
    ],
)
def test_runs_of_pieces_make_the_whole_tensor(second: SavedPiece, why: str | None) -> None:
    first = SavedPiece(offset=0, length=2, file="f", count=2, stride=4)
    stored = Stored(dtype="float32", size=8, pieces=(first, second))
    if why is None:
        covered(stored)
    else:
        with pytest.raises(ValueError, match=why):
            covered(stored)
