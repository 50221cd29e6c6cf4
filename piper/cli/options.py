"""What several verbs share: arguments and options, exit codes."""

from pathlib import Path
from typing import Annotated

import typer

SUCCESS = 0
NO = 1  # the answer of a check
USER_ERROR = 2
PREEMPTED = 75  # EX_TEMPFAIL: try again
INTERRUPTED = 130  # as a shell has it after Ctrl-C

Recipe = Annotated[str, typer.Argument(help="file.py:function, which returns a piper.Job", metavar="RECIPE")]
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
        help="a100, h100, h200, b200, cpu, or a TOML file; with --costs, only its links.",
        metavar="NAME|FILE",
    ),
]
StrategyFile = Annotated[
    Path | None,
    typer.Option("--strategy", help="A JSON strategy in place of the recipe's own.", metavar="FILE"),
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--out", help="The run's folder; else runs/recipe-function, numbered.", metavar="DIR"),
]
