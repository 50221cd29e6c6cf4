"""What must be on the disk before a checkpoint gets its name, and what its index may say."""

import os
from pathlib import Path

import pytest

from piper.checkpoint.metadata import Record, SavedPiece, Spec, Stored, check_model, plain_name
from piper.checkpoint.storage import covered
from piper.errors import ConfigError
from tests.checkpoint.test_folder import save


def test_all_is_on_the_disk_before_a_checkpoint_gets_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rename may reach the disk before the bytes that it names: only a sync before it keeps the order."""
    synced: list[str] = []
    seen: dict[str, list[str]] = {}  # by new name: what was on the disk when it was given
    held: dict[str, list[str]] = {}  # and what lay in the folder then
    fsync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(old: Path, new: Path, **named: int) -> None:
        seen[Path(new).name] = list(synced)
        held[Path(new).name] = sorted(path.name for path in Path(old).iterdir())
        rename(old, new, **named)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    save(tmp_path / "step-00000001", 1)
    before = seen["step-00000001"]
    assert held["step-00000001"] == ["checkpoint.json", "device-0.safetensors", "device-1.safetensors"]
    assert set(before) >= {*held["step-00000001"], ".step-00000001.partial"}
    assert tmp_path.name in synced[len(before) :], "the new name itself"


@pytest.mark.parametrize(
    ("pieces", "fits"),
    [
        ([(0, 4)], True),
        ([(2, 2), (0, 2)], True),
        ([(0, 2)], False),
        ([(0, 2), (3, 1)], False),  # a gap
        ([(0, 3), (2, 2)], False),  # an overlap
        ([(1, 3)], False),
        ([(0, 5)], False),
    ],
)
def test_pieces_make_the_whole_tensor(pieces: list[tuple[int, int]], fits: bool) -> None:
    made = tuple(SavedPiece(offset=first, length=length, file="f") for first, length in pieces)
    stored = Stored(dtype="float32", size=4, pieces=made)
    if fits:
        covered(stored)
    else:
        with pytest.raises(ValueError):
            covered(stored)


@pytest.mark.parametrize("name", ["../x", "a/b", "/etc/passwd", "."])
def test_a_file_of_a_checkpoint_lies_in_its_folder(name: str) -> None:
    with pytest.raises(ValueError):
        plain_name(name)


def test_the_name_of_a_file_is_itself() -> None:
    assert plain_name("device-0.safetensors") == "device-0.safetensors"


def test_a_checkpoint_that_lacks_a_parameter_is_of_another_model() -> None:
    weight = Spec(shape=(2,))
    check_model(Path("p"), Record(step=0, model={"w": weight}), {"w": weight})
    with pytest.raises(ConfigError, match="missing: b"):
        check_model(Path("p"), Record(step=0, model={"w": weight}), {"w": weight, "b": weight})
