"""`piper export` and `piper import`: checkpoints of a run to and from other programs."""

from pathlib import Path
from typing import Annotated

import typer

from piper.cli.application import Answer, Recipe, RunFolder, option
from piper.errors import ConfigError, deprecated

FORMS = ("hf", "peft", "dcp", "torchtitan", "safetensors", "torch")
LONG_NAMES = {"huggingface": "hf"}


def export(
    run: Annotated[
        str, typer.Argument(help="A run's folder, for its newest checkpoint, or a checkpoint.", metavar="RUN")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write: a new or empty one.", metavar="DIR")],
    form: Annotated[
        str | None,
        option(
            "hf or huggingface: a model for from_pretrained. peft: only the adapter. "
            "With the optimizer's state: dcp: a folder for dcp.load. torchtitan: one with its names. "
            "safetensors. torch: a file. "
            "Else hf for a model of transformers, and safetensors for any other.",
            "--format",
            metavar="|".join(FORMS),
        ),
    ] = None,
    to: Annotated[str | None, option("The old name of --format.", "--to", hidden=True)] = None,
    recipe: Annotated[
        str | None,
        # Named: some versions of typer name an option by a metavar that is its name in capitals.
        option("The recipe that builds the model; else the run's own.", "--recipe", metavar="RECIPE"),
    ] = None,
    dtype: Annotated[
        str | None, option("The type to write; else as trained.", metavar="fp32|bf16|fp64")
    ] = None,
) -> Answer:
    """Write a checkpoint of a run as a folder that other programs read."""
    import torch  # paid for only where it is used

    from piper.checkpoint.load import Values
    from piper.ir.dtypes import DTYPES
    from piper.ir.format import count, size
    from piper.recipe import load_recipe
    from piper.train.other_programs import checkpoint_of, export_state, export_values, form_for, recipe_of_run

    if to is not None:
        deprecated("--to", "--format", gone="0.2")
        form = to
    form = LONG_NAMES.get(form or "", form)
    if form not in (None, *FORMS):
        raise ConfigError(
            f"there is no format {form!r}", by="--format", hint="--format is one of " + ", ".join(FORMS)
        )
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(
            f"there is no type {dtype!r}", by="--dtype", hint="--dtype is one of " + ", ".join(DTYPES)
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            "this folder is not empty", by=str(folder), hint="name a new folder: export replaces nothing"
        )
    job = load_recipe(recipe or recipe_of_run(Path(run)))
    checkpoint = checkpoint_of(Path(run), job)
    form = form or form_for(job)
    values = Values(checkpoint)
    wanted = getattr(torch, DTYPES[dtype]) if dtype else None
    if form in ("hf", "peft"):
        kind = export_values(job, values, folder, adapter=form == "peft", dtype=wanted)
    else:
        kind = export_state(job, values, folder, form=form, dtype=wanted)
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    report = {
        "folder": str(folder),
        "format": form,
        "model": kind,
        "checkpoint": str(checkpoint),
        "step": values.record.step,
        "bytes": nbytes,
    }
    steps = count(values.record.step, "step")
    text = f"Exported {kind} after {steps}, {size(nbytes)}\n  from     {checkpoint}\n  to       {folder}\n"
    return Answer(report=report, show=text)


def import_weights(
    recipe: Recipe,
    weights: Annotated[
        Path, typer.Argument(help="A DCP folder, a folder of safetensors files, or a file of torch.save.")
    ],
    out: RunFolder = None,
) -> Answer:
    """Make a run that goes on from a checkpoint of another program: `piper train --resume` trains it."""
    from piper.ir.format import count
    from piper.recipe import load_recipe
    from piper.train.other_programs import import_start  # torch is paid for only where it is used

    made = import_start(recipe, load_recipe(recipe), weights, out)
    train = f"piper train {recipe} --out {made.folder} --resume"
    what = f"weights and optimizer after {count(made.step, 'step')}" if made.optimizer else "weights"
    text = f"Imported {weights}: {what}\n  run      {made.folder}\n  train    {train}\n"
    return Answer(
        report={"run": str(made.folder), "step": made.step, "optimizer": made.optimizer, "train": train},
        show=text,
    )
