"""A script as torchrun runs it, the same on every rank; each writes down what it saw: `ranks.py FOLDER WHAT...`.

Rank 0 goes on after its first launch. In the other ranks that launch ends the process.

PIPER_RANKS_DEVICE: the kind of device to run on. PIPER_RANKS_SHARE: how ranks that share one exchange values.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor, nn

import piper
from piper.compiler import Program
from piper.errors import PiperError
from tests.gpu.rank_process import become_rank
from tests.runtime.grid import Cell, batches, job
from tests.workers import sabotage
from tests.workers.sabotage import Sabotaged

CELL = Cell(case="mlp", schedule="1f1b", dp=1)  # two devices
MANY = Cell(case="mlp", schedule="1f1b", dp=2)
SHARE = "PIPER_RANKS_SHARE"
DEVICE = os.environ.get("PIPER_RANKS_DEVICE")
launch = partial(piper.launch, share=os.environ.get(SHARE, "host"))


def main(folder: Path, acts: list[str]) -> None:
    become_rank()
    program = piper.compile(job(CELL), device=DEVICE)
    for what in acts:
        seen = act(program, folder, what)
        path = folder / f"{what}.rank{os.environ['RANK']}.json"
        path.write_text(json.dumps(seen), encoding="utf-8")


def act(program: Program, folder: Path, what: str) -> dict[str, object]:
    seen: dict[str, object] = {}
    if what == "refused":
        seen["size"] = error_of(piper.compile(job(MANY), device=DEVICE))
    if what == "all":
        with launch(program, on="local", timeout=30) as run:
            seen["results"] = [[r.loss, r.grad_norm] for r in (run.step(batch) for batch in batches(CELL, 2))]
            seen["uneven"] = run.step({name: value[:3] for name, value in batches(CELL, 1)[0].items()}).loss
            seen["trained"] = [result.loss for result in run.train(1)]
            seen["evaluated"] = run.evaluate(batches(CELL, 2)).loss
            seen["predicted"] = run.predict(batches(CELL, 1)[0], forward).tolist()
            seen["rates"] = [group["lr"] for group in run.optimizer]
            run.save(folder / "saved")
            seen["state"] = {name: value.tolist() for name, value in run.state_dict().items()}
        with launch(program, on="torchrun", timeout=30, resume=folder / "saved") as run:
            seen["resumed"] = [r.loss for r in (run.step(batch) for batch in batches(CELL, 1))]
        seen["broken"] = error_of(Sabotaged(program=program, arg="F PP=1", act=sabotage.fail))
    if what == "raise":
        with launch(program, on="local", timeout=30) as run:
            run.step(batches(CELL, 1)[0])
        raise ValueError("the script fails")
    if what == "die":
        seen["dead"] = error_of(Sabotaged(program=program, arg="F PP=1", act=sabotage.die))
    if what == "stop":
        began = time.monotonic()
        seen["lost"] = error_of(Sabotaged(program=program, arg="F PP=1", act=sabotage.stop), timeout=90)
        seen["took"] = time.monotonic() - began
    return seen


def forward(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    y: Tensor = model(batch["x"])
    return y


def error_of(program: object, timeout: float = 30) -> str:
    """What a launch and two steps end with."""
    try:
        with launch(program, on="local", timeout=timeout) as run:  # type: ignore[arg-type]
            for batch in batches(CELL, 2):
                run.step(batch)
    except PiperError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
