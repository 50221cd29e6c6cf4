"""What cells have in common is worked out once: the capture of a model, and its numbers on one device.

Capture depends on the model, on the samples in a slice and on how experts and regions are divided, not on the
rest of the strategy; the numbers of one device depend on how the samples are cut, not on where they go. What is left of a
cell's cost is its steps, and those of many threads cost less than half on one core: on two, the threads take
the interpreter from each other at every operation.
"""

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

from piper import compiler
from piper.capture import recordings
from piper.capture.autodiff.differentiate import Captured, CodeCache, differentiate
from piper.capture.compile.cache import Cache
from piper.capture.shard.axis_sharding import Request
from piper.capture.shard.request import sharded
from piper.capture.trace.trace import Traced, trace
from piper.check.check import ComparedNumbers, Report, check, numbers
from piper.check.localise import Launch
from piper.check.reference import Reference
from piper.compiler import Program, optimizer_probe
from piper.compiler.optimizer_probe import OptimizerFacts, probe_optimizer
from piper.ir.chunk_options import CodeOptions
from piper.plan.bucket import Bucket
from piper.process.gc_pause import no_collection
from piper.run.launch import launch_inline
from piper.runtime.trainers import MakeOptimizer, Sizes
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, case_of, job

STEPS = 2  # the second works on what the first has left


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Keeps captures and references, those of one model at a time."""

    captures: dict[Hashable, Traced] = field(default_factory=dict)
    divisions: list[tuple[Traced, list[Request], Traced]] = field(default_factory=list)
    codes: dict[Hashable, Captured] = field(default_factory=dict)  # with what has been built of them
    references: dict[Hashable, list[ComparedNumbers]] = field(default_factory=dict)
    probes: dict[Hashable, OptimizerFacts] = field(default_factory=dict)

    def compile(self, cell: Cell, **changes: object) -> Program:
        """A cell's program."""
        with self.capturing():
            return compiler.compile(job(cell, **changes))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Let compilations inside share what they capture."""

        def traced(  # `built` belongs to one compilation, and changes nothing in what is captured
            model: Any,  # noqa: ANN401
            loss: Any,  # noqa: ANN401
            batch: Any,  # noqa: ANN401
            rows: int,
            *rest: Any,  # noqa: ANN401
            built: Any,  # noqa: ANN401
            **more: Any,  # noqa: ANN401
        ) -> Traced:
            made, fields = same(model), recordings.fields_of(batch)
            key = (made, same(loss), rows, *rest, *more.items(), *fields.items())
            if key not in self.captures:
                if any(known[0] != made for known in self.captures):  # type: ignore[index]
                    self.captures.clear()  # cells come model by model, and graphs are large
                    self.divisions.clear()
                    self.codes.clear()
                self.captures[key] = trace(model, loss, batch, rows, *rest, built=built, **more)
            return self.captures[key]

        def cut(whole: Traced, requests: Sequence[Request]) -> Traced:
            for known, asked, found in self.divisions:
                if known is whole and asked == list(requests):
                    return found
            made = sharded(whole, requests)
            self.divisions.append((whole, list(requests), made))
            return made

        def captured(
            found: Traced, options: Mapping[str, CodeOptions], cache: Cache | None, code: CodeCache
        ) -> Captured:
            key = (id(found), *options.items())
            if key not in self.codes:
                self.codes[key] = differentiate(found, options, cache, code)
            return self.codes[key]

        with (
            patch.object(optimizer_probe, "probe_optimizer", self.probed),
            patch.object(recordings, "trace", traced),
            patch.object(recordings, "sharded", cut),
            patch.object(recordings, "differentiate", captured),
        ):
            yield

    def probed(self, make: MakeOptimizer, sizes: Sizes, buckets: Sequence[Bucket]) -> OptimizerFacts:
        """What an optimizer does on some buckets; the rest of a strategy does not matter to it."""
        key = (same(make), tuple(sizes.items()), tuple(buckets))
        if key not in self.probes:
            self.probes[key] = probe_optimizer(make, sizes, buckets)
        return self.probes[key]

    def wanted(self, cell: Cell, program: Program) -> list[ComparedNumbers]:
        """What one device gives for a cell's batches, cut as the cell cuts them where a model mixes samples."""
        case = case_of(cell)
        cut = (cell.dp, cell.parts, cell.rows, program.job.clip_norm, program.job.precision)
        key = (case.name, case.stages, cut, cell.optimizer, cell.mask, cell.schedule == "dualpipe")
        if key not in self.references:
            reference = Reference(program, sliced=case.mixes_samples)
            self.references[key] = list(numbers(reference, batches(cell, STEPS)))
        return self.references[key]

    def check(self, cell: Cell, launch: Launch = launch_inline, options: Options | None = None) -> Report:
        """Whether a cell gives the numbers of one device."""
        given = batches(cell, STEPS)
        with no_collection():  # there are large graphs to look through, and nothing of them to collect
            program = self.compile(cell)
            return check(program, launch, given, options=options, wanted=self.wanted(cell, program))


def same(function: Any) -> Hashable:  # noqa: ANN401
    """What two functions share that are one function, or one made again: by another import of its file, or bound."""
    if isinstance(function, partial):
        return (same(function.func), function.args, *function.keywords.items())
    code = getattr(function, "__code__", None)
    return function if code is None else (code.co_filename, recordings.identity_of(function))


@contextmanager
def one_core() -> Iterator[None]:
    """Keep the threads that begin inside to one core: another one for each worker of the test run."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
