"""`piper import`: a run that begins with Hugging Face weights."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.options import AsJson, Recipe


def import_weights(
    recipe: Recipe,
    weights: Annotated[
        Path, typer.Argument(help="A folder of safetensors files, as save_pretrained writes it.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder; else runs/recipe-function, numbered.", metavar="DIR"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a run that begins with the weights of a Hugging Face folder: `piper train --resume` goes on."""
    from piper.recipe import load_recipe
    from piper.train.exporting import import_start  # torch is paid for only where it is used

    folder = import_start(recipe, load_recipe(recipe), weights, out)
    train = f"piper train {recipe} --out {folder} --resume"
    if as_json:
        sys.stdout.write(json.dumps({"run": str(folder), "train": train}) + "\n")
        return
    sys.stdout.write(f"Imported {weights}\n  run      {folder}\n  train    {train}\n")
