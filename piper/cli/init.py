"""`piper init`: a recipe to begin with."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from piper.cli.application import Answer
from piper.errors import file_errors


def init(name: Annotated[str, typer.Argument(help="The recipe's file: NAME.py.", metavar="NAME")]) -> Answer:
    """Write a recipe to begin with: a small model and strategies for one, two and four devices."""
    path = Path(name) if Path(name).suffix == ".py" else Path(f"{name}.py")
    template = (files("piper.cli") / "recipe.txt").read_text(encoding="utf-8")
    hint = "name a new file in a folder that exists and is yours: init replaces nothing"
    refused = file_errors("the recipe cannot be written", path, hint, ValueError)
    with refused, path.open("x", encoding="utf-8") as file:
        file.write(template.replace("FILE", str(path)))
    text = (
        f"Wrote {path}. Next:\n"
        f"  piper check {path}:four    the same numbers as one device?\n"
        f"  piper train {path}:four    trains on four processes of this machine\n"
    )
    return Answer(
        report={"file": str(path), "recipes": [f"{path}:{name}" for name in ("one", "two", "four")]},
        show=text,
    )
