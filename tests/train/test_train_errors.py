"""Each way in which a user can make training fail: one message, exit code 2, earlier checkpoints intact."""

import errno
import json
import os
from inspect import cleandoc
from pathlib import Path

import pytest
from torch import Tensor

from piper.checkpoint import storage
from piper.checkpoint.metadata import FileRecord
from piper.checkpoint.storage import write_file
from tests.train.conftest import RECIPE, Piper

ABOUT = {"recipe": "net.py:job", "seed": 0, "versions": {}}  # what makes a folder that of a run


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(RECIPE.splitlines(), 1) if text in line)


LINES = {
    "uneven": line_of("piper.split(piper.at(), parts=3)"),
    "changed": line_of("    def data():"),
    "short": line_of("data=lambda: iter_once"),
}
EVERYTHING_IS_WRITABLE = os.geteuid() == 0


def refused(piper: Piper, recipe: Path, name: str, message: str, *words: str) -> None:
    done = piper(f"{recipe}:{name}", *words)
    assert done.returncode == 2
    assert done.stderr.strip() == cleandoc(message).format(recipe=recipe, **LINES)


def test_fewer_steps_than_one(piper: Piper, recipe: Path) -> None:
    message = """
        error: piper train: --steps 0
          hint: train at least 1 step
    """
    refused(piper, recipe, "job", message, "--steps", "0")


def test_a_recipe_that_is_not_there(piper: Piper, tmp_path: Path) -> None:
    message = """
        error: nowhere.py: there is no such file
          hint: give the path of a Python file, then :function
    """
    refused(piper, Path("nowhere.py"), "job", message)
    assert not (tmp_path / "runs").exists()


def test_a_batch_that_does_not_divide(piper: Piper, recipe: Path) -> None:
    message = """
        error: strategy (net.py:{uneven}): 8 samples do not divide into 3 equal pieces
          devices: 1 slices of the samples
          parts:   3 in each slice (MB=3)
          hint:    use a batch that is a multiple of 3, fewer parts or fewer devices
    """
    refused(piper, recipe, "uneven", message)


def test_a_later_batch_with_other_axes(piper: Piper, recipe: Path) -> None:
    message = """
        error: data (net.py:{changed}), step 3: the batch is not like the one that was compiled
          wanted: x (8, 8), or other sizes of 2 axes
          got:    x (8, 1, 8)
          hint:   give every step a batch of the same fields and types, of the same number of axes; sizes may differ
    """
    refused(piper, recipe, "deeper", message)


def test_data_that_ends(piper: Piper, recipe: Path) -> None:
    """Its first batch would be looked at when the job is compiled, and not come again."""
    message = """
        error: data (net.py:{short}): data() returns the same iterator each time, so its first batch would be lost to compile
          hint: let each call make the batches: `def data(): yield from ...`, or return a list or a loader
    """
    refused(piper, recipe, "short", message)


def test_a_folder_that_is_a_file(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = """
        error: file: the run's folder cannot be written
          why:  File exists
          hint: name a folder you own, on a disk with room: --out DIR
    """
    refused(piper, recipe, "job", message, "--out", "file")


@pytest.mark.skipif(EVERYTHING_IS_WRITABLE, reason="root may write everywhere")
def test_a_folder_of_somebody_else(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o500)
    message = """
        error: theirs: the run's folder cannot be written
          why:  Permission denied
          hint: name a folder you own, on a disk with room: --out DIR
    """
    refused(piper, recipe, "job", message, "--out", "theirs")


def test_a_folder_that_nobody_can_make(piper: Piper, recipe: Path) -> None:
    message = """
        error: /proc/run: the run's folder cannot be written
          why:  No such file or directory
          hint: name a folder you own, on a disk with room: --out DIR
    """
    refused(piper, recipe, "job", message, "--out", "/proc/run")


def test_a_folder_of_another_run(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "run" / "run.json").write_text(json.dumps(ABOUT))
    message = """
        error: run: this folder holds a run already
          has:  metrics.jsonl
          hint: add --resume to go on with it, or name another folder with --out
    """
    refused(piper, recipe, "job", message, "--out", "run")


def test_a_resume_under_another_seed(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(ABOUT))
    message = """
        error: run: the run was started with another seed, so its samples came in another order
          run:  seed 0
          job:  seed 7
          hint: put the seed back, or start a run of its own with another --out
    """
    refused(piper, recipe, "other_seed", message, "--out", "run", "--resume")


def test_a_resume_of_a_job_without_checkpoints(piper: Piper, recipe: Path) -> None:
    message = """
        error: --resume: the job saves no checkpoints, so there is nothing to go on from
          hint: let the job save: piper.Job(..., checkpoint=piper.Checkpoint(folder="checkpoints"))
    """
    refused(piper, recipe, "unsaved", message, "--resume")


def saved(folder: Path) -> list[str]:
    """The names of what lies among a run's checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_disk_that_is_full_leaves_earlier_checkpoints(
    piper: Piper, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = {"step-00000004"}

    def write(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
        if any(name in str(path) for name in full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_file(path, tensors)

    monkeypatch.setattr(storage, "write_file", write)
    message = """
        {kind}: save: the checkpoint could not be written
          path:    {folder}/step-0000000{step}
          why:     device-00000.safetensors: [Errno 28] No space left on device
          earlier: every checkpoint that was complete still is
          hint:    make room or choose another folder, then save again; training can go on
    """
    message = cleandoc(message).replace("{folder}", str(tmp_path / "run" / "checkpoints"))
    done = piper(f"{recipe}:single", "--out", "run")
    assert (done.returncode, done.stderr) == (0, ""), "a save on the way may fail"
    assert done.stdout.count(message.format(kind="warning", step=4)) == 1
    assert saved(tmp_path / "run") == ["step-00000002", "step-00000006"]
    full |= {"step-00000007"}
    done = piper(f"{recipe}:single", "--out", "run", "--resume", "--steps", "7")
    assert done.returncode == 2, "the last one may not"
    assert done.stderr.strip() == message.format(kind="error", step=7)
    assert saved(tmp_path / "run") == ["step-00000002", "step-00000006"]
    full.clear()
    done = piper(f"{recipe}:single", "--out", "run", "--resume", "--steps", "7")
    assert done.returncode == 0 and "after step 6\n" in done.stdout
    assert saved(tmp_path / "run") == ["step-00000006", "step-00000007"]


def test_a_place_for_checkpoints_that_cannot_be_written(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(ABOUT))
    (tmp_path / "run" / "checkpoints").touch()
    message = """
        error: save: the checkpoint could not be written
          path:    {folder}
          why:     [Errno 17] File exists: '{folder}'
          earlier: every checkpoint that was complete still is
          hint:    make room or choose another folder, then save again; training can go on
    """
    refused(piper, recipe, "single", message.replace("{folder}", "run/checkpoints"), "--out", "run")


def test_a_checkpoint_of_another_model(piper: Piper, recipe: Path, tmp_path: Path) -> None:
    assert piper(f"{recipe}:single", "--out", "run", "--steps", "2").returncode == 0
    message = """
        error: load: this checkpoint is of another model
          path:  {folder}/step-00000002
          other: layers.1.weight: saved [8, 8] float32 trained, here [4, 8] float32 trained
                 layers.1.bias: saved [8] float32 trained, here [4] float32 trained
          hint:  load it into the model and precision that it was saved from
    """
    folder = tmp_path / "run" / "checkpoints"
    wanted = message.replace("{folder}", str(folder))
    refused(piper, recipe, "other_model", wanted, "--out", "run", "--resume")
    assert saved(tmp_path / "run") == ["step-00000002"]


def test_a_loss_that_is_no_number_stops_and_leaves_checkpoints(
    piper: Piper, recipe: Path, tmp_path: Path
) -> None:
    message = """
        error: step 4: the numbers are not finite any more
          loss:     nan
          gradient: norm nan
          hint:     name the first chunk that made it: --detect-nan, or piper.launch(program, keep_outputs=True)
    """
    refused(piper, recipe, "finite_only", message, "--out", "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_detect_nan_names_the_chunk_that_made_it(piper: Piper, recipe: Path) -> None:
    """The first stage's outputs are large but finite; squared in the second stage they are not."""
    message = """
        error: step 4: the numbers are not finite any more
          loss:     nan
          gradient: norm nan
          first:    F[PP=1]: PP=1.out0 holds a NaN on device 2
          hint:     lower the learning rate or clip the gradient; --resume goes on from the last checkpoint
    """
    refused(piper, recipe, "large", message, "--detect-nan")


def test_detect_nan_names_the_first_chunk(piper: Piper, recipe: Path) -> None:
    message = """
        error: step 4: the numbers are not finite any more
          loss:     nan
          gradient: norm nan
          first:    F[PP=0 MB=0]: PP=0.out0 holds a NaN on device 0
          hint:     lower the learning rate or clip the gradient; --resume goes on from the last checkpoint
    """
    refused(piper, recipe, "nan", message, "--detect-nan")
