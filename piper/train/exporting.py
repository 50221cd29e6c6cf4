"""Weights of runs out to Hugging Face's folders, and in from them as the start of a run."""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from piper.capture.trace.build_model import build_fake
from piper.checkpoint.folder import step_path
from piper.checkpoint.huggingface import export_adapter, export_hf, import_hf, is_adapted, merged
from piper.checkpoint.metadata import FILE, DamagedError
from piper.compiler import compile
from piper.errors import ConfigError
from piper.job import Job
from piper.recipe import file_and_function
from piper.run.driver_checkpoints import write_start
from piper.run.saves import checkpoints_of, past_of, prepare_saves
from piper.runtime.setup import build_model
from piper.train.lock import locked
from piper.train.run_folder import ABOUT, choose, claim, prepare, read_about


def export_values(
    job: Job, values: Mapping[str, Tensor], folder: Path, *, adapter: bool, dtype: torch.dtype | None
) -> str:
    """Write the values of a job's model as an export, and return the name of the class that it is for.

    adapter: only the adapter of a model that peft has wrapped. False: all of the model, adapters merged in.
    """
    model = build_fake(job.model, FakeTensorMode(), torch.float32, torch.device("cpu"))
    weights = {name: values[name] for name in model.state_dict() if name in values}
    if is_adapted(model):
        model = build_model(job, torch.device("cpu"))
        model.load_state_dict(weights, strict=False)
        if not adapter:
            model = merged(model)
            weights = model.state_dict()
    elif adapter:
        raise ConfigError(
            f"a {type(model).__name__} has no adapter",
            by="--format peft",
            hint="export all of it: --format hf",
        )
    if adapter:
        export_adapter(model, folder, dtype)
    else:
        export_hf(weights, model, folder, dtype)
    return type(model).__name__


def import_start(recipe: str, job: Job, weights: Path, out: Path | None) -> Path:
    """Make the folder of a run that begins with the weights in a Hugging Face folder, and return it."""
    if job.checkpoint is None:
        raise ConfigError(
            "the job saves no checkpoints, so it cannot go on from one either",
            by=recipe,
            hint='let the job save: piper.Job(..., checkpoint=piper.Checkpoint(folder="checkpoints"))',
        )
    model = build_fake(job.model, FakeTensorMode(), torch.float32, torch.device("cpu"))
    if is_adapted(model):
        raise ConfigError(
            "peft has wrapped the model, and a folder of weights is that of its base",
            by=recipe,
            hint="build the base with from_pretrained in the recipe: the run then starts from it",
        )
    values = import_hf(weights, model if hasattr(model, "save_pretrained") else None)
    program = compile(job)
    folder = choose(out, recipe, resume=False)
    claim(folder)
    with locked(folder):
        prepare(folder, job, resume=False)
        where = prepare_saves(folder, job, lambda path: False)
        assert where is not None, "the job has a checkpoint"
        write_start(program, values, step_path(where, 0))
    return folder


def recipe_of_run(folder: Path) -> str:
    """Return the recipe of a run, or of the run that a checkpoint lies in: as it was when the run started."""
    for place in (folder, *folder.absolute().parents[:2]):
        recipe, kept = read_about(place).get("recipe"), place / "recipe.py"
        if recipe is None or not kept.is_file():
            continue
        file, function = file_and_function(str(recipe))
        same = Path(file).is_file() and Path(file).read_bytes() == kept.read_bytes()
        return str(recipe) if same else f"{kept}:{function}"
    raise ConfigError(
        "there is no run here, or it does not say which recipe it ran",
        by=str(folder),
        facts={"looked": f"for {ABOUT} and recipe.py"},
        hint="name the folder that `piper train --out DIR` wrote, or add --recipe file.py:function",
    )


def checkpoint_of(folder: Path, job: Job) -> Path:
    """Return the checkpoint that a path names: itself, or the newest of a run's folder."""
    if (folder / FILE).is_file():
        return folder
    past = [] if checkpoints_of(folder, job) is None else past_of(folder, job)
    for checkpoint in past:
        if not isinstance(checkpoint, DamagedError):
            return checkpoint
        sys.stderr.write(
            f"{checkpoint.path} is damaged ({checkpoint.why}): looking for an earlier checkpoint\n"
        )
    raise ConfigError(
        "this run has no complete checkpoint",
        by=str(folder),
        facts={"looked": f"in {checkpoints_of(folder, job) or 'a folder that the job does not name'}"},
        hint='let the job save: piper.Job(..., checkpoint=piper.Checkpoint(folder="checkpoints"))',
    )
