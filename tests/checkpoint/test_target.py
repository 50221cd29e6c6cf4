"""Nothing of the user's is ever deleted: places that a checkpoint or an export must not take."""

import json
import os
from collections.abc import Callable, Iterator
from inspect import cleandoc
from pathlib import Path

import pytest
import torch

from piper.checkpoint.folder import begin, commit, step_path
from piper.checkpoint.metadata import Record, Spec, read_record
from piper.checkpoint.storage import TensorRange, index_of, write_parts
from piper.checkpoint.target import MARK, UnwrittenError, remove, target_of
from piper.errors import ConfigError
from piper.run.driver_checkpoints import write_start
from piper.run.launch import launch_inline
from piper.run.run import Run
from tests.checkpoint.jobs import program

Place = Callable[[Path], Path | str]


def save(path: Path, step: int = 1) -> None:
    """Write a checkpoint of one tensor."""
    partial = begin(path)
    value = torch.full((4,), float(step))
    written = write_parts(partial, "device-0", [TensorRange(key="model.w", size=4, start=0, tensor=value)])
    record = Record(
        step=step,
        seed=0,
        model={"w": Spec(shape=(4,))},
        tensors=index_of([written.placed]),
        files=written.files,
    )
    commit(path, record)


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """All that lies in a folder: files with their bytes, links with their targets."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with work in it, as the current folder and as the home."""
    work = tmp_path / "home" / "project" / "work"
    for name in ("results/loss.csv", "results/deep/notes.txt", "thesis.tex", "theirs/checkpoint.json"):
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}" if name.endswith("json") else name)
    (work / "link").symlink_to("results")
    (work / "dangling").symlink_to("nowhere")
    (work / "file-link").symlink_to("thesis.tex")
    save(work / "ours")
    (work / "ours-link").symlink_to("ours")
    save(work / "noted")
    (work / "noted" / "README.txt").write_text("the best one")
    os.mkfifo(work / "fifo")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return work


PLACES: dict[str, tuple[Place, str]] = {
    "empty": (lambda _: "", "it is not a path"),
    "spaces": (lambda _: "  ", "it is not a path"),
    "dot": (lambda _: ".", "it is the current folder"),
    "empty path": (lambda _: Path(), "it is the current folder"),
    "here by name": (lambda here: here, "it is the current folder"),
    "here by a detour": (lambda _: "results/..", "it is the current folder"),
    "here through a link": (lambda _: "link/..", "it is the current folder"),
    "parent": (lambda _: "..", "the current folder lies in it"),
    "grandparent": (lambda here: here.parents[1], "the current folder lies in it"),
    "root": (lambda _: "/", "the current folder lies in it"),
    "another root": (lambda _: "/proc", "it is the root of a file system"),
    "nul": (lambda _: "a\0b", "it is not a path"),
    "results": (lambda _: "results", "the folder exists, and is not a checkpoint: it holds deep, loss.csv"),
    "a file": (lambda _: "thesis.tex", "a file of this name exists"),
    "a pipe": (lambda _: "fifo", "a file of this name exists"),
    "a link": (lambda _: "link", "it is a symbolic link"),
    "a link to nowhere": (lambda _: "dangling", "it is a symbolic link"),
    "a link to a file": (lambda _: "file-link", "it is a symbolic link"),
    "a link to ours": (lambda _: "ours-link", "it is a symbolic link"),
    "another's record": (
        lambda _: "theirs",
        "the folder exists, and is not a checkpoint: it holds checkpoint.json",
    ),
    "notes in ours": (lambda _: "noted", "the checkpoint there holds files that are not its own: README.txt"),
}


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with launch_inline(program("mlp", "one")) as made:
        yield made


@pytest.mark.parametrize("name", PLACES)
def test_a_place_that_is_refused(name: str, here: Path, run: Run) -> None:
    place, why = PLACES[name]
    outside = here.parents[2]
    before = tree(outside)
    for write in (
        lambda: run.save(place(here)),
        lambda: write_start(program("mlp", "one"), run.state_dict(), place(here)),
        lambda: begin(target_of(place(here))),
    ):
        with pytest.raises(UnwrittenError) as error:
            write()
        assert str(error.value).startswith(
            "save: nothing is written here, because something of yours could be lost\n  path: "
        )
        assert f"\n  why:  {why}\n" in str(error.value)
        assert tree(outside) == before


def test_the_home_folder(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    home = here / "results"
    monkeypatch.setenv("HOME", str(home))
    before = tree(here)
    with pytest.raises(UnwrittenError, match="why:  it is your home folder"):
        run.save("~".replace("~", str(home)))
    assert tree(here) == before


@pytest.mark.parametrize("given", [None, 3, b"bytes"])
def test_what_is_not_a_path(given: object, run: Run) -> None:
    with pytest.raises(ConfigError, match="why:  it is not a path"):
        run.save(given)  # type: ignore[arg-type]


def test_a_new_folder_an_empty_one_and_one_of_ours(here: Path, run: Run) -> None:
    (here / "empty").mkdir()
    before = {name: data for name, data in tree(here).items() if not name.startswith(("ours/", "empty"))}
    for place in ("new/deep/a", "empty", "ours", here / "ours"):
        run.save(place)
        assert sorted(p.name for p in Path(place).iterdir()) == [
            "checkpoint.json",
            "device-00000.safetensors",
        ]
    after = {
        name: data for name, data in tree(here).items() if not name.startswith(("ours/", "empty", "new"))
    }
    assert after == before


def test_a_current_folder_that_was_deleted(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    (here / "gone").rmdir()
    run.save(here / "new")
    assert read_record(here / "new").step == 0
    with pytest.raises(UnwrittenError, match="No such file"):
        run.save("relative")


def test_the_whole_message(here: Path, run: Run) -> None:
    with pytest.raises(ConfigError) as error:
        run.save("results")
    assert str(error.value).replace(str(here), "HERE") == cleandoc("""
        save: nothing is written here, because something of yours could be lost
          path: HERE/results
          why:  the folder exists, and is not a checkpoint: it holds deep, loss.csv
          hint: name a new folder, or an earlier checkpoint or export that may be replaced
    """)


def test_what_comes_while_a_save_is_written_stays(here: Path) -> None:
    partial = begin(here / "late")
    assert partial.is_dir()
    (here / "late").mkdir()
    (here / "late" / "mine.txt").write_text("mine")
    with pytest.raises(UnwrittenError, match=r"it holds mine\.txt"):
        commit(here / "late", Record(step=0))
    assert (here / "late" / "mine.txt").read_text() == "mine"
    assert not partial.exists()


def test_a_damaged_one_is_set_aside(here: Path) -> None:
    for number, text in enumerate(("{", '{"format": "piper checkpoint"}')):
        path = step_path(here, number)
        save(path)
        (path / "checkpoint.json").write_text(text)
        for again in (1, 2):
            save(path, step=again)
            assert read_record(path).step == again
            if again == 1:
                aside = path.with_name(f"{path.name}.damaged")
                assert (aside / "checkpoint.json").read_text() == text
                (path / "checkpoint.json").write_text("[")
        assert path.with_name(f"{path.name}.damaged-2").is_dir()


def test_one_without_a_record_is_set_aside_by_its_name_only(here: Path) -> None:
    for name in ("step-00000007", "other"):
        save(here / name)
        (here / name / "checkpoint.json").unlink()
    save(here / "step-00000007", 2)
    assert [p.name for p in (here / "step-00000007.damaged").iterdir()] == ["device-0.safetensors"]
    with pytest.raises(UnwrittenError, match=r"is not a checkpoint: it holds device-0\.safetensors"):
        save(here / "other", 2)


def test_a_folder_in_the_way_of_a_partial_one(here: Path) -> None:
    hidden = here / ".new.partial"
    hidden.mkdir()
    (hidden / "mine.txt").write_text("mine")
    with pytest.raises(UnwrittenError, match="Directory not empty"):
        begin(here / "new")
    assert (hidden / "mine.txt").read_text() == "mine"


def test_removal_takes_only_what_is_listed(here: Path) -> None:
    save(here / "a")
    (here / "a" / "mine.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        remove(here / "a")
    assert [path.name for path in (here / "a").iterdir()] == ["mine.txt"]
    remove(here / "link")
    remove(here / "thesis.tex")
    assert (here / "link").is_symlink() and (here / "thesis.tex").exists()


def test_an_export_is_known_by_its_mark(here: Path) -> None:
    export = here / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")
    (export / MARK).write_text(json.dumps({"format": "piper export", "files": ["config.json"]}))
    assert target_of(export) == export
    (export / "chat.txt").write_text("mine")
    with pytest.raises(UnwrittenError, match=r"files that are not its own: chat\.txt"):
        target_of(export)
    (export / MARK).write_text(json.dumps({"format": "other", "files": ["config.json"]}))
    with pytest.raises(UnwrittenError, match=r"is not a checkpoint: it holds chat\.txt, config\.json"):
        target_of(export)
