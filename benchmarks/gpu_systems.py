"""Piper beside the systems themselves, as whole jobs of four NCCL ranks on one GPU.

    pip download --no-deps --dest build/wheels -c constraints.txt --only-binary :all: --python-version 312 \\
        --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \\
        torchtitan torchdata tyro docstring-parser typeguard megatron-core einops hjson py-cpuinfo psutil \\
        pydantic pydantic-core annotated-types typing-inspection typing-extensions tqdm
    DS_BUILD_OPS=0 pip wheel --no-deps --wheel-dir build/wheels deepspeed==0.19.8
    for wheel in build/wheels/*.whl; do unzip -qo $wheel -d build/site; done
    PYTHONPATH=.:build/site python -m benchmarks.gpu_systems --size small --out systems.jsonl

The folder is for Python 3.12, beside torch, numpy, packaging and msgpack; it takes 35 MB, and 27 without
`deepspeed/ops/csrc` and without symbols. All systems run at the sizes of `gpu_ranks`, with the weights of the
same seed and the same batch: the first ten losses agree. TorchTitan runs its own trainer, models, FSDP,
experts, pipeline and compilation; Megatron-Core its own GPT model, schedules, tensor and data parallelism and
optimizer, without Transformer Engine and Apex; DeepSpeed its engine with ZeRO around our decoder in plain
PyTorch. The name of a side says what is sharded where it is not the row's: `megatron_zero1` only optimizer
state. Output and conventions are those of `gpu_ranks`. A system that cannot be
imported here, or fails, says why in its rows.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection

from benchmarks.gpu_ranks import arguments, run_rows, started
from benchmarks.ranks_deepspeed import ROWS_OF_STAGE, train_deepspeed
from benchmarks.ranks_megatron import ROWS_OF_BLOCKS, ROWS_OF_MEGATRON, ROWS_OF_ZERO1, train_megatron
from benchmarks.ranks_rows import RANKS
from benchmarks.ranks_sides import Figures, ProcessSide, Task, serve, side_of
from benchmarks.ranks_titan import ROWS_OF_TITAN, train_titan

SYSTEMS: dict[str, tuple[Callable[[Task, int], Figures], Sequence[str]]] = {
    "torchtitan": (train_titan, ROWS_OF_TITAN),
    "megatron": (train_megatron, ROWS_OF_MEGATRON),
    "megatron_compiled": (partial(train_megatron, blocks=True), ROWS_OF_BLOCKS),
    "megatron_zero1": (partial(train_megatron, zero1=True), ROWS_OF_ZERO1),
    **{
        f"deepspeed_zero{stage}": (partial(train_deepspeed, stage=stage), rows)
        for stage, rows in ROWS_OF_STAGE.items()
    },
}


class SystemMain:
    """What a process of a system runs."""

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank

    def __call__(self, pipe: Connection) -> None:
        train, _ = SYSTEMS[self.name]
        serve(pipe, lambda task: train(task, self.rank))


def ranks_of(name: str) -> ProcessSide:
    """Return a system's ranks."""
    hosts = [{"NCCL_HOSTID": f"{name}{rank}"} for rank in range(RANKS)]
    return ProcessSide([SystemMain(name, rank) for rank in range(RANKS)], hosts, lasting=False)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="with commas between them")
    rows = [*dict.fromkeys(row for _, rows in SYSTEMS.values() for row in rows)]
    options = arguments(parser, rows, words)
    systems = options.systems.split(",")
    sides: dict[str, ProcessSide] = {name: ranks_of(name) for name in systems}
    sides["piper"] = side_of("piper")

    def sides_of(row: str) -> list[str]:
        return [*(name for name in systems if row in SYSTEMS[name][1]), "piper"]

    said = "benchmarks.gpu_systems " + " ".join(sys.argv[1:] if words is None else words)
    with started(options, said) as (task, report):
        run_rows(options, task, report, sides, sides_of)


if __name__ == "__main__":
    main()
