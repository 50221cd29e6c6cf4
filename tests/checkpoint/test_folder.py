"""Whatever happens while a checkpoint is written or dropped, the last complete one can be loaded."""

from collections.abc import Callable
from inspect import cleandoc
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from piper.checkpoint import folder as folders
from piper.checkpoint import storage
from piper.checkpoint.folder import begin, commit, latest, retain, settled, step_path
from piper.checkpoint.metadata import DamagedError, Record, Spec, read_record
from piper.checkpoint.storage import CheckpointReader, TensorRange, index_of, write_parts
from piper.errors import ConfigError


def save(path: Path, step: int) -> None:
    """A checkpoint of one tensor, which says its step, from two writers."""
    partial = begin(path)
    value = torch.full((6,), float(step))
    written = [
        write_parts(
            partial, f"device-{i}", [TensorRange(key="model.w", size=6, start=start, tensor=value[start:end])]
        )
        for i, (start, end) in enumerate([(0, 2), (2, 6)])
    ]
    files = {name: file for one in written for name, file in one.files.items()}
    index = index_of(one.placed for one in written)
    record = Record(step=step, seed=0, model={"w": Spec(shape=(6,))}, tensors=index, files=files)
    commit(path, record)


def value_of(path: Path) -> list[float]:
    """The tensor of a checkpoint, by way of a reader that wants the middle of it last."""
    found = torch.zeros(6)
    cuts = [(0, 1), (1, 5), (5, 6)]
    CheckpointReader(path, read_record(path)).read(
        TensorRange(key="model.w", size=6, start=low, tensor=found[low:high]) for low, high in cuts
    )
    return found.tolist()


class KilledError(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


class Reaper:
    """Ends the process at one of its moments: before or after a change on disk, or in the middle of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
        self.left = moment
        for owner, name in (
            (Path, "mkdir"),
            (Path, "rename"),
            (Path, "write_text"),
            (folders, "sync"),
            (storage, "write_file"),
            (Path, "unlink"),
            (Path, "rmdir"),
        ):
            monkeypatch.setattr(owner, name, self.around(getattr(owner, name)))

    def tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KilledError

    def around(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
            self.tick()
            result = change(*arguments, **named)
            self.tick()
            return result

        return changed


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step again"])
def test_a_kill_at_any_moment_leaves_a_checkpoint(again: bool, tmp_path: Path) -> None:
    for moment in count():
        folder = tmp_path / str(moment)
        for step in (1, 2):
            save(step_path(folder, step), step)
        step = 2 if again else 3
        with pytest.MonkeyPatch.context() as patched:
            reaper = Reaper(patched, moment)
            try:
                save(step_path(folder, step), 3)
                retain(folder, 2)
            except KilledError:
                pass
            ended = reaper.left >= 0
        newest = latest(folder)
        assert newest is not None
        assert value_of(newest) in ([[3.0] * 6] if ended else [[2.0] * 6, [3.0] * 6])
        if again:
            assert value_of(settled(step_path(folder, 2))) == value_of(newest)
        save(step_path(folder, 4), 4)  # and whatever was left does not stand in the way
        retain(folder, 2)
        newest = latest(folder)
        assert newest is not None and value_of(newest) == [4.0] * 6
        assert len([*folder.iterdir()]) <= 2
        if ended:
            assert moment > 15
            return


def test_latest_looks_for_the_newest_complete_one(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    for step in (9, 10, 11):
        save(step_path(tmp_path, step), step)
    (tmp_path / "notes").mkdir()
    assert latest(str(tmp_path)) == tmp_path / "step-00000011"
    (tmp_path / "step-00000011" / "device-1.safetensors").unlink()
    assert latest(tmp_path) == tmp_path / "step-00000010"
    (tmp_path / "step-00000010" / "checkpoint.json").write_text("{")
    assert latest(tmp_path) == tmp_path / "step-00000009"


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "saved", 1)

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(DamagedError, match="Permission denied"):
        read_record(tmp_path / "saved")


def test_retention_keeps_the_newest_complete_ones(tmp_path: Path) -> None:
    for step in range(5):
        save(step_path(tmp_path, step), step)
    (tmp_path / "step-00000004" / "device-0.safetensors").write_bytes(b"")
    (tmp_path / "mine").mkdir()
    retain(tmp_path, 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["mine", "step-00000002", "step-00000003", "step-00000004"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as error:
        begin(tmp_path / "file" / "step-00000001")
    assert str(error.value).replace(str(tmp_path), "TMP") == cleandoc("""
        save: the checkpoint could not be written
          path:    TMP/file/step-00000001
          why:     [Errno 17] File exists: 'TMP/file'
          earlier: every checkpoint that was complete still is
          hint:    make room or choose another folder, then save again; training can go on
    """)


def test_a_replacement_that_fails_gives_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = step_path(tmp_path, 1)
    save(path, 1)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ConfigError) as error:
        save(path, 2)
    assert str(error.value).replace(str(tmp_path), "TMP") == cleandoc("""
        save: the checkpoint could not be written
          path:    TMP/step-00000001
          why:     [Errno 5] Input/output error
          earlier: every checkpoint that was complete still is
          hint:    make room or choose another folder, then save again; training can go on
    """)
    assert [p.name for p in tmp_path.iterdir()] == [path.name] and value_of(path) == [1.0] * 6


def test_an_old_one_that_cannot_be_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(step_path(tmp_path, step), step)

    def fail(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ConfigError) as error:
        retain(tmp_path, 1)
    assert str(error.value).replace(str(tmp_path), "TMP") == cleandoc("""
        save: an old checkpoint could not be dropped
          path:   TMP/step-00000001
          why:    [Errno 13] Permission denied
          newest: TMP/step-00000002
          hint:   the newest is complete; see who may write to this folder
    """)
