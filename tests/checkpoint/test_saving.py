"""Saving while training goes on, saves that fail, and checkpoints that do not fit: one message each."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from inspect import cleandoc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from piper.checkpoint import storage
from piper.checkpoint.folder import latest, step_path
from piper.checkpoint.metadata import (
    FileRecord,
    Record,
    Spec,
    Trainer,
    check_model,
    check_trainer,
    read_record,
    seal,
)
from piper.checkpoint.storage import write_file
from piper.compiler import Program, compile
from piper.errors import ConfigError
from piper.run.launch import launch_inline
from piper.run.run import Run
from tests.checkpoint.jobs import batches, case, equal_bits, program, strategy
from tests.runtime.grid import Cell, job

BATCH = batches("mlp", 0, 1)[0]


@pytest.fixture
def run() -> Iterator[Run]:
    with launch_inline(program("mlp", "dp2")) as made:
        made.step(BATCH)
        yield made


def text_of(error: pytest.ExceptionInfo[ConfigError], tmp_path: Path) -> str:
    return str(error.value).replace(str(tmp_path), "TMP")


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_training_goes_on_while_a_save_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slowly(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
        assert gate.wait(20)
        return write_file(path, tensors)

    monkeypatch.setattr(storage, "write_file", slowly)
    before = run.state_dict()
    run.save(step_path(tmp_path, 1), wait=False)
    after = [run.step(BATCH).loss for _ in range(2)]
    assert latest(tmp_path) is None
    threading.Timer(0.1, gate.set).start()
    run.save(step_path(tmp_path, 3), wait=False, keep=1)  # waits for the one before
    assert latest(tmp_path) == step_path(tmp_path, 1)
    run.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    with launch_inline(program("mlp", "one")) as other:
        assert other.load(step_path(tmp_path, 3)).step == 3
        assert equal_bits(other.state_dict(), run.state_dict())
    assert not equal_bits(run.state_dict(), before) and after[1] < after[0]


def test_a_save_that_is_under_way_is_complete_at_the_end(tmp_path: Path) -> None:
    with launch_inline(program("mlp", "dp2")) as run:
        run.step(BATCH)
        run.save(step_path(tmp_path, 1), wait=False)
    assert latest(tmp_path) == step_path(tmp_path, 1)


@pytest.mark.parametrize("way", ["settle", "save", "close"])
def test_a_full_disk_is_one_error_and_training_goes_on(
    run: Run, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(step_path(tmp_path, 1))
    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_file", full_disk)
        run.save(step_path(tmp_path, 2), wait=False, keep=1)
        run.step(BATCH)
        calls: dict[str, Callable[[], None]] = {
            "settle": run.settle,
            "save": lambda: run.save(step_path(tmp_path, 3)),
            "close": run.close,
        }
        with pytest.raises(ConfigError) as error:
            calls[way]()
    assert text_of(error, tmp_path) == cleandoc("""
        save: the checkpoint could not be written
          path:    TMP/step-00000002
          why:     device-00000.safetensors: [Errno 28] No space left on device
          earlier: every checkpoint that was complete still is
          hint:    make room or choose another folder, then save again; training can go on
    """)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert read_record(step_path(tmp_path, 1)).step == 1
    if way != "close":
        run.step(BATCH)
        run.save(step_path(tmp_path, 4), keep=1)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_save_over_an_earlier_one_takes_its_place(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "here")
    run.step(BATCH)
    run.save(tmp_path / "here")
    assert run.load(tmp_path / "here").step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_data_that_cannot_be_written_stops_the_save(run: Run, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"save: a part of the state cannot be written down\n  at:   data.file"
    ):
        run.save(tmp_path / "a", data={"file": object()})
    assert [*tmp_path.iterdir()] == []


def test_there_is_no_checkpoint(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run.load(tmp_path)
    assert text_of(error, tmp_path) == cleandoc("""
        load: there is no complete checkpoint here
          path:    TMP
          missing: checkpoint.json
          hint:    give the folder of one checkpoint, such as the newest that latest(folder) finds
    """)


def truncate(path: Path) -> None:
    with (path / "device-00000.safetensors").open("r+b") as file:
        file.truncate(100)


def pickle_it(path: Path) -> None:
    (path / "checkpoint.json").write_bytes(b"\x80\x04.")


def edit(**fields: object) -> Callable[[Path], None]:
    def edited(path: Path) -> None:
        record = path / "checkpoint.json"
        record.write_text(seal(json.loads(record.read_text()) | fields))

    return edited


def replaced(old: str, new: str) -> Callable[[Path], None]:
    def edited(path: Path) -> None:
        record = path / "checkpoint.json"
        assert record.read_text().count(old) == 1
        record.write_text(record.read_text().replace(old, new))

    return edited


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (
        lambda path: (path / "device-00000.safetensors").unlink(),
        "device-00000.safetensors is missing",
    ),
    "short": (truncate, "device-00000.safetensors has 100 bytes, not SIZE"),
    "no json": (
        pickle_it,
        "checkpoint.json: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
    ),
    "other": (
        replaced('"format": "piper checkpoint"', '"format": "zip"'),
        "checkpoint.json: ValueError: it is not a piper checkpoint",
    ),
    "newer": (
        replaced('"version": 2', '"version": 9'),
        "checkpoint.json: ValueError: it has version 9, and this Piper reads version 2",
    ),
    "unsealed": (
        replaced('"step": 1', '"step": 7'),
        "checkpoint.json: ValueError: its text is not what was written (its digest differs)",
    ),
    "outside": (edit(files={"../a": 1}), "checkpoint.json: ValueError: '../a' is not the name of a file"),
    "data": (edit(data={"call": []}), "checkpoint.json: there is no kind of value 'call'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(run: Run, damage: str, tmp_path: Path) -> None:
    path, before = tmp_path / "a", run.state_dict()
    run.save(path)
    size = (path / "device-00000.safetensors").stat().st_size
    act, why = DAMAGES[damage]
    act(path)
    with pytest.raises(ConfigError) as error:
        run.load(path)
    assert text_of(error, tmp_path) == cleandoc(f"""
        load: this checkpoint is damaged
          path: TMP/a
          why:  {why.replace("SIZE", str(size))}
          hint: load an earlier one; a save that is interrupted never leaves one like this
    """)
    assert equal_bits(run.state_dict(), before)


def test_bytes_that_are_wrong_change_nothing(run: Run, tmp_path: Path) -> None:
    """One worker reads its part, the other finds the damage: neither takes anything, and the run goes on."""
    run.save(tmp_path / "good")
    run.step(BATCH)
    run.save(tmp_path / "a")
    before = run.state_dict()
    file = tmp_path / "a" / "device-00000.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(ConfigError) as error:
        run.load(tmp_path / "a")
    assert text_of(error, tmp_path) == cleandoc("""
        load: this checkpoint is damaged
          path: TMP/a
          why:  device-00000.safetensors: bytes 0 to SIZE are not those that were written (their digest differs)
          hint: load an earlier one; a save that is interrupted never leaves one like this
    """).replace("SIZE", str(file.stat().st_size - 1))
    assert run.session.open and equal_bits(run.state_dict(), before)
    assert run.load(tmp_path / "good").step == 1
    assert not equal_bits(run.state_dict(), before)


def two_groups(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    first, *rest = params
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=1e-3)


def test_an_optimizer_with_other_groups(tmp_path: Path) -> None:
    made = program("mlp", "one")
    with launch_inline(made) as run:
        run.save(tmp_path / "a")
    grouped = replace(made, job=replace(made.job, optimizer=two_groups))
    with launch_inline(grouped) as other, pytest.raises(ConfigError) as error:
        other.load(tmp_path / "a")
    assert text_of(error, tmp_path) == cleandoc("""
        load: the optimizer has other groups of parameters
          path:  TMP/a
          saved: 1 groups
          here:  2 groups
          hint:  go on with the same optimizer
    """)


class Remembering(torch.optim.SGD):
    """Works by element, but keeps the last three norms of each tensor it is given."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                norms = self.state[parameter].setdefault("norms", torch.zeros(3))
                norms.copy_(torch.cat([norms[1:], parameter.norm().float().view(1)]))


def test_an_optimizer_whose_state_goes_with_whole_parameters(tmp_path: Path) -> None:
    made = program("mlp", "dp4-zero2")
    job = replace(made.job, optimizer=lambda params: Remembering(params, lr=0.1))
    with launch_inline(replace(made, job=job)) as run:
        run.step(BATCH)
        with pytest.raises(ConfigError) as error:
            run.save(tmp_path / "a")
    assert text_of(error, tmp_path) == cleandoc("""
        save: the optimizer's state cannot be written down from shards
          path:  TMP/a
          state: optimizer.layers.0.weight.norms of shape [3]
          shard: 68 of 256 elements
          hint:  use zero=0, or an elementwise optimizer such as AdamW or SGD
    """)
    assert [*tmp_path.iterdir()] == []


def test_a_checkpoint_of_another_model(run: Run, tmp_path: Path) -> None:
    with launch_inline(other_model()) as other:
        other.save(tmp_path / "a")
    before = run.state_dict()
    with pytest.raises(ConfigError) as error:
        run.load(tmp_path / "a")
    assert text_of(error, tmp_path) == cleandoc("""
        load: this checkpoint is of another model
          path:    TMP/a
          missing: layers.2.weight, layers.2.bias, layers.3.weight, and 1 more
          other:   layers.1.weight: saved [4, 16] float64 trained, here [16, 16] float64 trained
                   layers.1.bias: saved [4] float64 trained, here [16] float64 trained
          hint:    load it into the model and precision that it was saved from
    """)
    assert equal_bits(run.state_dict(), before)


def other_model() -> Program:
    made = case("mlp")
    two = {"model": lambda: type(made.model())(2), "loss": made.loss, "data": lambda: [BATCH]}
    return compile(job(Cell(case="mlp"), strategy=strategy("one", 2), **two))


def test_what_is_unexpected_is_named() -> None:
    record = Record(step=0, model={"w": Spec(shape=(2,)), "old": Spec(shape=())})
    with pytest.raises(ConfigError) as error:
        check_model(Path("here"), record, {"w": Spec(shape=(2,), dtype="float32", trainable=True)})
    assert str(error.value) == cleandoc("""
        load: this checkpoint is of another model
          path:       here
          unexpected: old
          hint:       load it into the model and precision that it was saved from
    """)


def test_a_job_that_trains_in_another_way() -> None:
    record = Record(step=0, seed=0, trainer=Trainer(optimizer="torch.optim.sgd.SGD", scheduler="my.Warmup"))
    check_trainer(Path("here"), record, record.trainer, 0)
    with pytest.raises(ConfigError) as error:
        check_trainer(Path("here"), record, Trainer(optimizer="torch.optim.adamw.AdamW"), 1)
    assert str(error.value) == cleandoc("""
        load: this checkpoint comes from a job that trains in another way
          path:      here
          optimizer: saved torch.optim.sgd.SGD, here torch.optim.adamw.AdamW
          scheduler: saved my.Warmup, here none
          seed:      saved 0, here 1
          hint:      go on with the same optimizer, scheduler, seed; begin a new run from exported weights
    """)


def test_nothing_in_a_checkpoint_is_a_pickle(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "a", data={"order": torch.arange(3)})
    found = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert found == ["checkpoint.json", "device-00000.safetensors"]
    data = run.load(tmp_path / "a").data
    assert isinstance(data, dict) and torch.equal(data["order"], torch.arange(3))
