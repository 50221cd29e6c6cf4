"""Edits of a real checkpoint: each is refused with one message that names the file, and changes no number."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from piper.checkpoint.folder import latest, verify
from piper.checkpoint.load import Values
from piper.checkpoint.metadata import seal
from piper.checkpoint.storage import write_file
from piper.errors import ConfigError
from piper.run.launch import launch_inline
from piper.run.run import Run
from tests.checkpoint.jobs import batches, equal_bits, program

Edit = Callable[[Path], None]
Change = Callable[[dict[str, Any]], object]  # of a record
JSON = "checkpoint.json"
D0, D1, D2, D3 = (f"device-0000{n}.safetensors" for n in range(4))
WEIGHT = "layers.0.weight"


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """A run after three steps, which no load below may change."""
    with launch_inline(program("mlp", "dp4-zero2")) as made:
        yield made


@pytest.fixture(scope="module")
def saved(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four devices with AdamW's moments, after two steps, and one after a step beside it."""
    folder = tmp_path_factory.mktemp("saved")
    for step, batch in enumerate(batches("mlp", 0, 3), start=1):
        run.step(batch)
        if step < 3:
            run.save(folder / f"step-{step}", data={"seen": step})
    assert sorted(p.name for p in (folder / "step-2").iterdir()) == [JSON, D0, D1, D2, D3]
    return folder


def flip(name: str, where: float | int, bit: int = 0) -> Edit:
    """Flip a bit of the byte at an offset: from the end if below 0, a share of the file if it is a float."""

    def edit(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[int(where * len(data)) if isinstance(where, float) else where] ^= 1 << bit
        (path / name).write_bytes(data)

    return edit


def cut(name: str, size: int) -> Edit:
    """Keep so many bytes of a file; below 0: all but so many."""
    return lambda path: void((path / name).write_bytes((path / name).read_bytes()[:size]))


def void(_: object) -> None:
    return None


def zero(name: str, first: int, last: int | None) -> Edit:
    """Fill bytes of a file with zeros."""

    def edit(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        places = range(len(data))[first:last]
        assert any(data[place] for place in places)
        for place in places:
            data[place] = 0
        (path / name).write_bytes(data)

    return edit


def append(name: str, data: bytes) -> Edit:
    return lambda path: void((path / name).write_bytes((path / name).read_bytes() + data))


def swap(one: str, other: str) -> Edit:
    def edit(path: Path) -> None:
        first, second = (path / one).read_bytes(), (path / other).read_bytes()
        assert first != second and len(first) == len(second)
        (path / one).write_bytes(second)
        (path / other).write_bytes(first)

    return edit


def copy(one: str, other: str) -> Edit:
    return lambda path: void(shutil.copyfile(path / one, path / other))


def older(name: str) -> Edit:
    """Bring back a file of the checkpoint before, whose tensors have the same shapes."""
    return lambda path: void(shutil.copyfile(path.with_name("older") / name, path / name))


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Edit:
    """Write a safetensors file with other values under its names, well formed."""

    def edit(path: Path) -> None:
        values = load_file(path / name)
        change(values)
        (path / name).unlink()
        write_file(path / name, values)

    return edit


def swap_moments(values: dict[str, torch.Tensor]) -> None:
    one, other = f"optimizer.{WEIGHT}.exp_avg", f"optimizer.{WEIGHT}.exp_avg_sq"
    assert values[one].shape == values[other].shape
    values[one], values[other] = values[other], values[one]


def swap_between(one: str, other: str) -> Edit:
    """Exchange two tensors of the same shape between two files."""

    def edit(path: Path) -> None:
        files = [load_file(path / name) for name in (one, other)]
        shared = sorted(k for k in files[0] if k in files[1] and files[0][k].shape == files[1][k].shape)
        shared = [key for key in shared if not torch.equal(files[0][key], files[1][key])]
        files[0][shared[0]], files[1][shared[0]] = files[1][shared[0]], files[0][shared[0]]
        for name, values in zip((one, other), files, strict=True):
            (path / name).unlink()
            write_file(path / name, values)

    return edit


def in_header(old: bytes, new: bytes) -> Edit:
    def edit(path: Path) -> None:
        data = (path / D0).read_bytes()
        assert old in data and len(old) == len(new)
        (path / D0).write_bytes(data.replace(old, new, 1))

    return edit


def changed(change: Change) -> Edit:
    """Change the record, which keeps its digest."""

    def edit(path: Path) -> None:
        found = json.loads((path / JSON).read_text())
        change(found)
        (path / JSON).write_text(json.dumps(found) + "\n")

    return edit


def resealed(change: Change) -> Edit:
    """Change the record and give it a digest that fits."""

    def edit(path: Path) -> None:
        found = json.loads((path / JSON).read_text())
        change(found)
        (path / JSON).write_text(seal(found))

    return edit


def to(name: str, value: object) -> Edit:
    """Give a field of the record another value."""
    return changed(lambda found: found.update({name: value}))


def text(old: str, new: str) -> Edit:
    def edit(path: Path) -> None:
        before = (path / JSON).read_text()
        assert before.count(old) >= 1
        (path / JSON).write_text(before.replace(old, new, 1))

    return edit


def no_seal(version: int) -> Edit:
    def edit(path: Path) -> None:
        found = json.loads((path / JSON).read_text())
        del found["digest"]
        (path / JSON).write_text(json.dumps(found | {"version": version}))

    return edit


def folder_instead(path: Path) -> None:
    (path / D0).unlink()
    (path / D0).mkdir()


def without_moments(found: dict[str, Any]) -> None:
    """Take all moments out, from both sections that have them."""
    found["moments"] = {}
    found["tensors"] = {k: v for k, v in found["tensors"].items() if not k.startswith("optimizer.")}


def piece(how: Callable[[Change], Edit], place: int, number: int, value: object) -> Edit:
    return how(lambda found: set_item(found["tensors"][f"model.{WEIGHT}"]["pieces"][place], number, value))


def set_item(held: list[object], place: int, value: object) -> None:
    held[place] = value


def wrong_digest(found: dict[str, Any]) -> None:
    digest = found["files"][D1]["digests"][0]
    found["files"][D1]["digests"][0] = ("0" if digest[0] != "0" else "1") + digest[1:]


DIGEST = "its text is not what was written"
BYTES = "are not those that were written"
PLACES = (0, 3, 7, 8, 12, 60, 0.25, 0.5, 0.75, -9, -1)  # length, header, data, end
EDITS: dict[str, tuple[Edit, str, str]] = {  # the edit, the file that is named, and some of the reason
    **{f"flip {D0} at {p}": (flip(D0, p), D0, BYTES) for p in PLACES},
    **{f"flip {D3} at {p}": (flip(D3, p, bit=6), D3, BYTES) for p in PLACES},
    "flip the first byte of the record": (flip(JSON, 0), JSON, "JSONDecodeError"),
    "flip a high bit of the record": (flip(JSON, 0.5, bit=7), JSON, "can't decode"),
    "flip the format's name": (text("piper checkpoint", "piper checkpoinu"), JSON, "not a piper checkpoint"),
    "flip the version": (text('"version": 2', '"version": 3'), JSON, "it has version 3"),
    "flip the digest": (flip(JSON, 60), JSON, DIGEST),
    "flip the step": (text('"step": 2', '"step": 3'), JSON, DIGEST),
    "flip a learning rate": (text('"lr": 0.', '"lr": 1.'), JSON, DIGEST),
    "flip the data's state": (text('"seen": 2', '"seen": 3'), JSON, DIGEST),
    "flip the last byte of the record": (flip(JSON, -1), JSON, "Error"),
    "record without its last byte": (cut(JSON, -1), JSON, DIGEST),
    "half a record": (cut(JSON, 2000), JSON, "JSONDecodeError"),
    "empty record": (cut(JSON, 0), JSON, "JSONDecodeError"),
    "record and a space": (append(JSON, b" "), JSON, DIGEST),
    "record and a second one": (append(JSON, b"{}"), JSON, "JSONDecodeError"),
    "zeros for the record": (zero(JSON, 0, None), JSON, "JSONDecodeError"),
    "zeros in the record": (zero(JSON, -40, None), JSON, "JSONDecodeError"),
    "a key twice": (text('"seed": 0', '"seed": 0, "step": 9'), JSON, DIGEST),
    "record of another step": (older(JSON), D0, BYTES),
    "empty file": (cut(D1, 0), D1, "has 0 bytes, not"),
    "first 100 bytes": (cut(D1, 100), D1, "has 100 bytes, not"),
    "file without its last byte": (cut(D1, -1), D1, "bytes, not"),
    "file and a byte": (append(D1, b"\0"), D1, "bytes, not"),
    "zeros at the end": (zero(D1, -64, None), D1, BYTES),
    "zeros in the middle": (zero(D1, -600, -500), D1, BYTES),
    "zeros for a header": (zero(D1, 0, 200), D1, BYTES),
    "zeros for a file": (zero(D1, 0, None), D1, BYTES),
    "no first file": (lambda path: (path / D0).unlink(), D0, "is missing"),
    "no last file": (lambda path: (path / D3).unlink(), D3, "is missing"),
    "no record": (lambda path: (path / JSON).unlink(), JSON, "missing"),
    "folder for a file": (folder_instead, D0, "is missing"),
    "two files swapped": (swap(D1, D2), D1, BYTES),
    "a file for another": (copy(D1, D2), D2, BYTES),
    "file of another step": (older(D2), D2, BYTES),
    "a file too many": (copy(D0, "device-00009.safetensors"), "device-00009.safetensors", "does not list it"),
    "moments swapped": (tensors(D0, swap_moments), D0, BYTES),
    "tensors swapped between files": (swap_between(D1, D2), D1, BYTES),
    "another type in a header": (in_header(b'"F64"', b'"I64"'), D0, BYTES),
    "another name in a header": (in_header(b"exp_avg_sq", b"exp_avg_sp"), D0, BYTES),
    "step Infinity": (to("step", float("inf")), JSON, DIGEST),
    "step NaN": (to("step", float("nan")), JSON, DIGEST),
    "step -1": (to("step", -1), JSON, DIGEST),
    "step '2'": (to("step", "2"), JSON, DIGEST),
    "step 2.0": (to("step", 2.0), JSON, DIGEST),
    "step true": (to("step", True), JSON, DIGEST),
    "step null": (to("step", None), JSON, DIGEST),
    "step beyond 64 bits": (to("step", 2**64), JSON, DIGEST),
    "no step": (changed(lambda found: found.pop("step")), JSON, DIGEST),
    "no step, resealed": (resealed(lambda found: found.pop("step")), JSON, "KeyError: 'step'"),
    "no seed": (to("seed", None), JSON, DIGEST),
    "empty model": (to("model", {}), JSON, DIGEST),
    "empty moments": (to("moments", {}), JSON, DIGEST),
    "empty tensors": (to("tensors", {}), JSON, DIGEST),
    "empty files": (to("files", {}), JSON, DIGEST),
    "empty trainer": (to("trainer", {}), JSON, DIGEST),
    "no moments anywhere": (changed(without_moments), JSON, DIGEST),
    "one parameter's moments": (changed(lambda found: found["moments"].pop(WEIGHT)), JSON, DIGEST),
    "one moment": (changed(lambda found: found["moments"][WEIGHT].pop("exp_avg")), JSON, DIGEST),
    "no groups": (changed(lambda found: found["trainer"].update(groups=None)), JSON, DIGEST),
    "empty groups": (
        resealed(lambda found: found["trainer"].update(groups=[{"map": {}}])),
        JSON,
        "has no lr",
    ),
    "one tensor": (changed(lambda found: found["tensors"].pop(f"model.{WEIGHT}")), JSON, DIGEST),
    "another shape": (changed(lambda found: found["model"][WEIGHT].update(shape=[16, 15])), JSON, DIGEST),
    "another type": (changed(lambda found: found["model"][WEIGHT].update(dtype="float32")), JSON, DIGEST),
    "negative piece": (piece(changed, 0, 1, -4), JSON, DIGEST),
    "gap": (piece(changed, 1, 0, 70), JSON, DIGEST),
    "piece in another file": (piece(resealed, 0, 2, D1), D1, "than the record says"),
    "piece outside": (piece(resealed, 0, 2, "../" + D0), JSON, "is not the name of a file"),
    "wrong digest": (resealed(wrong_digest), D1, BYTES),
    "files without digests": (
        resealed(lambda found: found.update(files={k: v["size"] for k, v in found["files"].items()})),
        JSON,
        "TypeError: FileRecord is an object, not ",
    ),
    "no seal": (no_seal(2), JSON, "KeyError: 'digest'"),
    "an old version": (no_seal(1), JSON, "it has version 1, and this Piper reads version 2"),
    "another block": (to("block", 7), JSON, DIGEST),
    "data that would be called": (
        resealed(lambda found: found.update(data={"call": []})),
        JSON,
        "there is no kind of value 'call'",
    ),
}


def test_there_are_at_least_sixty() -> None:
    assert len(EDITS) >= 60


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_refused_and_changes_nothing(name: str, run: Run, saved: Path, tmp_path: Path) -> None:
    edit, file, why = EDITS[name]
    shutil.copytree(saved / "step-1", tmp_path / "older")
    shutil.copytree(saved / "step-1", tmp_path / "step-1")
    shutil.copytree(saved / "step-2", tmp_path / "step-2")
    edit(tmp_path / "step-2")
    before = run.state_dict()
    with pytest.raises(ConfigError) as error:
        run.load(tmp_path / "step-2")
    said = str(error.value)
    assert said.startswith("load: ") and str(tmp_path / "step-2") in said
    assert file in said and why in said
    assert run.session.open and equal_bits(run.state_dict(), before)
    if name not in ("empty groups", "data that would be called", "piece in another file"):  # found at load
        assert latest(tmp_path) == tmp_path / "step-1"
        with pytest.raises(ConfigError):
            verify(tmp_path / "step-2")


def test_without_an_edit_it_is_loaded(run: Run, saved: Path) -> None:
    before = run.state_dict()
    assert latest(saved) == saved / "step-2"
    assert verify(saved / "step-2").step == 2
    assert run.load(saved / "step-2").data == {"seen": 2}
    assert not equal_bits(run.state_dict(), before)
    values = Values(saved / "step-2")
    assert equal_bits({name: values[name] for name in values}, run.state_dict())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_flip_anywhere_is_noticed(saved: Path, tmp_path: Path) -> None:
    """Bytes all over every file, one bit each."""
    shutil.copytree(saved / "step-2", tmp_path / "a")
    for file in sorted((tmp_path / "a").iterdir()):
        data = file.read_bytes()
        for place in range(0, len(data), 17):
            changed = bytearray(data)
            changed[place] ^= 1 << place % 7
            file.write_bytes(changed)
            with pytest.raises(ConfigError):
                verify(tmp_path / "a")
        file.write_bytes(data)
    assert verify(tmp_path / "a").step == 2
