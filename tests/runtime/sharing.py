"""What cells have in common is worked out once: the capture of a model, and its numbers on one device.

Nearly all that a cell costs is capture. It depends on the model and on the samples in a slice, not on the
strategy, and the numbers of one device depend on how the samples are cut, not on where they go.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from piper import api
from piper.api import Program
from piper.capture.trace import Traced, trace
from piper.launchers.inline import launch_inline
from piper.runtime.check import Launch, Numbers, Report, check, numbers
from piper.runtime.reference import Reference
from piper.runtime.worker import Options
from tests.runtime.grid import Cell, batches, case_of, job

STEPS = 2  # the second works on what the first has left


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Keeps captures and references, those of one model at a time."""

    captures: dict[Hashable, Traced] = field(default_factory=dict)
    references: dict[Hashable, list[Numbers]] = field(default_factory=dict)

    def compile(self, cell: Cell, **changes: object) -> Program:
        """A cell's program."""
        with self.capturing():
            return api.compile(job(cell, **changes))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Let compilations inside share what they capture."""

        def traced(model: Any, loss: Any, batch: Any, rows: int, *rest: Any, **more: Any) -> Traced:  # noqa: ANN401
            key = (model, loss, rows, *rest, *more.items())
            if key not in self.captures:
                if any(known[0] is not model for known in self.captures):  # type: ignore[index]
                    self.captures.clear()  # cells come model by model, and graphs are large
                self.captures[key] = trace(model, loss, batch, rows, *rest, **more)
            return self.captures[key]

        with patch.object(api, "trace", traced):
            yield

    def wanted(self, cell: Cell, program: Program) -> list[Numbers]:
        """What one device gives for a cell's batches."""
        case = case_of(cell)
        cut = (cell.dp, cell.parts, cell.rows, program.job.clip_norm, program.job.precision)
        key = (case.name, case.stages, cut)
        if key not in self.references:
            self.references[key] = list(numbers(Reference(program), batches(cell, STEPS)))
        return self.references[key]

    def check(self, cell: Cell, launch: Launch = launch_inline, options: Options | None = None) -> Report:
        """Whether a cell gives the numbers of one device."""
        program = self.compile(cell)
        given = batches(cell, STEPS)
        return check(program, launch, given, options=options, wanted=self.wanted(cell, program))
