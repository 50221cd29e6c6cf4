"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help="file.py:function, which returns a piper.Job", metavar="RECIPE")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Device = Annotated[
    str | None, typer.Option(help="cpu or cuda; else CUDA where there is any.", metavar="cpu|cuda")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Run chunks as Inductor compiles them; kept in ~/.cache/piper.")
]
CostsFile = Annotated[
    Path | None,
    typer.Option("--costs", help="Measured costs, from `piper profile --calibrate`.", metavar="FILE"),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="a100, h100, h200, cpu, or a TOML file; with --costs, only its links.",
        metavar="NAME|FILE",
    ),
]
StrategyFile = Annotated[
    Path | None,
    typer.Option("--strategy", help="A JSON strategy in place of the recipe's own.", metavar="FILE"),
]
