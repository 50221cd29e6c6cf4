"""`piper export` and `piper import`: weights of a run to and from folders of Hugging Face's libraries."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.options import AsJson, Recipe, RunFolder, print_json
from piper.errors import ConfigError, deprecated

FORMS = ("hf", "peft")


def export(
    run: Annotated[
        str, typer.Argument(help="A run's folder, for its newest checkpoint, or a checkpoint.", metavar="RUN")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write: a new or empty one.", metavar="DIR")],
    form: Annotated[
        str,
        typer.Option(
            "--format", help="hf: a model for from_pretrained. peft: only the adapter.", metavar="hf|peft"
        ),
    ] = "hf",
    to: Annotated[str | None, typer.Option("--to", help="The old name of --format.", hidden=True)] = None,
    recipe: Annotated[
        str | None,
        # Named: some versions of typer name an option by a metavar that is its name in capitals.
        typer.Option(
            "--recipe", help="The recipe that builds the model; else the run's own.", metavar="RECIPE"
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="The type to write; else as trained.", metavar="fp32|bf16|fp64")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a run as a folder that transformers or peft reads."""
    import torch  # paid for only where it is used

    from piper.checkpoint.load import Values
    from piper.ir.dtypes import DTYPES
    from piper.ir.format import count, size
    from piper.recipe import load_recipe
    from piper.train.exporting import checkpoint_of, export_values, recipe_of_run

    if to is not None:
        deprecated("--to", "--format", gone="0.2")
        form = to
    if form not in FORMS:
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
    values = Values(checkpoint)
    wanted = getattr(torch, DTYPES[dtype]) if dtype else None
    kind = export_values(job, values, folder, adapter=form == "peft", dtype=wanted)
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    report = {
        "folder": str(folder),
        "model": kind,
        "checkpoint": str(checkpoint),
        "step": values.record.step,
        "bytes": nbytes,
    }
    if as_json:
        print_json(report)
        return
    steps = count(values.record.step, "step")
    sys.stdout.write(
        f"Exported {kind} after {steps}, {size(nbytes)}\n  from     {checkpoint}\n  to       {folder}\n"
    )


def import_weights(
    recipe: Recipe,
    weights: Annotated[
        Path, typer.Argument(help="A folder of safetensors files, as save_pretrained writes it.")
    ],
    out: RunFolder = None,
    as_json: AsJson = False,
) -> None:
    """Make a run that begins with the weights of a Hugging Face folder: `piper train --resume` goes on."""
    from piper.recipe import load_recipe
    from piper.train.exporting import import_start  # torch is paid for only where it is used

    folder = import_start(recipe, load_recipe(recipe), weights, out)
    train = f"piper train {recipe} --out {folder} --resume"
    if as_json:
        print_json({"run": str(folder), "train": train})
        return
    sys.stdout.write(f"Imported {weights}\n  run      {folder}\n  train    {train}\n")
