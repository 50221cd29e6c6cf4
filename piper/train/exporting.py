"""Writes checkpoints of runs for other programs: Hugging Face's, and all that read plain PyTorch's names."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from piper.capture.trace.build_model import build_fake
from piper.checkpoint.compatibility import check_model
from piper.checkpoint.huggingface import export_hf, is_adapted, quiet, ties_of, write_export
from piper.checkpoint.json_state import decode
from piper.checkpoint.load import WAYS, Values
from piper.checkpoint.metadata import FILE, DamagedError, Spec
from piper.checkpoint.plain_export import FORMATS, PlainExport
from piper.checkpoint.plain_state import Options
from piper.errors import ConfigError
from piper.job import Job
from piper.recipe import file_and_function
from piper.run.saves import checkpoints_of, past_of
from piper.runtime.setup import build_model
from piper.runtime.standins import Sizes, hollow, whole_view
from piper.runtime.trainers import make_optimizer
from piper.train.run_folder import ABOUT, read_about


def form_for(job: Job) -> str:
    """Return the format of an export that names none: hf for models of transformers, else safetensors."""
    model = build_fake(job.model, FakeTensorMode(), torch.float32, torch.device("cpu"))
    known = is_adapted(model) or is_adapted(model, "transformers", "PreTrainedModel")
    return "hf" if known else "safetensors"


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
            model = cast(Any, model).merge_and_unload()
            weights = model.state_dict()
    elif adapter:
        raise ConfigError(
            f"a {type(model).__name__} has no adapter",
            by="--format peft",
            hint="export all of it: --format hf",
        )
    if adapter:
        with quiet():
            write_export(folder, cast(Any, model if dtype is None else model.to(dtype)).save_pretrained)
    else:
        export_hf(weights, model, folder, dtype)
    return type(model).__name__


def export_state(job: Job, values: Values, folder: Path, *, form: str, dtype: torch.dtype | None) -> str:
    """Write weights, optimizer and step of a checkpoint for other programs; return the class of the model."""
    model = build_fake(job.model, FakeTensorMode(), torch.float32, torch.device("cpu"))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    names: dict[str, str] = {}
    for several in ties_of(model):
        own = next((name for name in several if name in values), several[0])
        names |= dict.fromkeys(several, own)
    record = values.record
    wanted = {own: Spec(shape=shapes[name]) for name, own in names.items()}
    saved_too = {
        name: spec for name, spec in record.values.items() if name in wanted or spec.trainable is not None
    }
    check_model(values.folder, replace(record, model=saved_too), wanted)
    groups: list[tuple[Options, Sequence[str]]] = []
    if record.trainer.groups is not None:
        sizes = {name: spec.shape for name, spec in record.model.items() if spec.trainable}
        optimizer, members = grouped(job, sizes)
        saved = cast("list[dict[str, object]]", decode(record.trainer.groups))
        for options, here, own_names in zip(saved, optimizer.param_groups, members, strict=True):
            kept = {key: value for key, value in options.items() if key != "param_names"}
            groups.append((kept | {key: here[key] for key in WAYS if key in here}, own_names))
    export = PlainExport(values=values, model=names, groups=groups, dtype=dtype)
    write_export(folder, lambda partial: FORMATS[form](export, partial))
    return type(model).__name__


def grouped(job: Job, sizes: Sizes) -> tuple[Optimizer, list[list[str]]]:
    """Return a job's optimizer over parameters without elements, and the names in each of its groups."""
    named = hollow(whole_view(sizes), sizes)
    optimizer = make_optimizer(job.optimizer, named)
    names = {id(tensor): name for name, tensor in named}
    return optimizer, [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


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
