"""Which checkpoints are kept and which are dropped, as literal lists; and what is on the disk when."""

import os
from pathlib import Path

import pytest

from piper.checkpoint import folder as folders
from piper.checkpoint.folder import Retention, latest, retain, step_path
from piper.checkpoint.metadata import read_record
from piper.checkpoint.target import UndroppedError
from tests.checkpoint.test_target import save


def saved(folder: Path, *steps: int) -> None:
    for step in steps:
        save(step_path(folder, step), step)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(folder: Path, step: int) -> None:
    """Flip a bit of a tensor: the record and all sizes stay right."""
    file = step_path(folder, step) / "device-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("keep", "damaged", "kept"),
    [
        (1, [], [5]),
        (2, [], [4, 5]),
        (3, [], [3, 4, 5]),
        (5, [], [1, 2, 3, 4, 5]),
        (9, [], [1, 2, 3, 4, 5]),
        (1, [5], [4, 5]),
        (2, [5], [3, 4, 5]),
        (2, [4], [3, 4, 5]),
        (2, [4, 5], [2, 3, 4, 5]),
        (2, [1], [4, 5]),
        (2, [2, 3, 4, 5], [1, 2, 3, 4, 5]),
        (1, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
    ],
)
def test_only_good_ones_count(keep: int, damaged: list[int], kept: list[int], tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, 5)
    for step in damaged:
        damage(tmp_path, step)
    retain(tmp_path, keep)
    assert left(tmp_path) == [f"step-{step:08}" for step in kept]
    good = [step for step in kept if step not in damaged]
    assert latest(tmp_path) == (step_path(tmp_path, good[-1]) if good else None)


def test_what_is_not_a_checkpoint_of_ours_stays(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4)
    (step_path(tmp_path, 1) / "why-this-one.txt").write_text("the best")
    for name in ("step-00000000", "step-9.bak", "notes", ".step-00000002.partial", ".step-00000007.trash"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    (tmp_path / ".step-00000003.partial").mkdir()
    retain(tmp_path, 1)
    assert left(tmp_path) == [
        ".step-00000002.partial",
        ".step-00000007.trash",
        "notes",
        "step-00000000",
        "step-00000001",
        "step-00000004",
        "step-9.bak",
    ]
    assert read_record(step_path(tmp_path, 1)).step == 1


def test_one_that_was_set_aside_by_a_kill_is_dropped_too(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    step_path(tmp_path, 1).rename(tmp_path / ".step-00000001.old")
    retain(tmp_path, 2)
    assert left(tmp_path) == ["step-00000002", "step-00000003"]


def test_what_a_process_wrote_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def watched(path: Path) -> bool:
        read.append(path.name)
        return True

    monkeypatch.setattr(folders, "intact", watched)
    keeping = Retention()
    saved(tmp_path, 1, 2)
    keeping.start(tmp_path, 2)
    assert keeping.finish() is None and read == ["step-00000002", "step-00000001"]
    for step in (3, 4):
        saved(tmp_path, step)
        keeping.trust(step_path(tmp_path, step))
        keeping.start(tmp_path, 2)
        assert keeping.finish() is None
    assert read == ["step-00000002", "step-00000001"], "2 was known by then, 3 and 4 were written here"
    assert left(tmp_path) == ["step-00000003", "step-00000004"]
    damage(tmp_path, 4)
    saved(tmp_path, 5)
    keeping.trust(step_path(tmp_path, 5))
    keeping.start(tmp_path, 2)
    assert keeping.finish() is None and read[2:] == ["step-00000004"], "it has changed"


def test_an_error_comes_at_the_end(tmp_path: Path) -> None:
    keeping = Retention()
    keeping.start(tmp_path / "nowhere", 1)
    assert isinstance(keeping.finish(), UndroppedError)
    assert keeping.finish() is None


def test_everything_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 1)
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(f"sync {path.relative_to(tmp_path)}")
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        calls.append(f"rename {self.name} {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    save(tmp_path / "a", 2)
    assert calls == [
        "sync .a.partial/device-0.safetensors",
        "sync .a.partial/checkpoint.json",
        "sync .a.partial",
        "rename a .a.old",
        "rename .a.partial a",
        "sync .",
    ]
