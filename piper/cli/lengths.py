"""What `piper simulate` says of a job with a strategy for each length: its steps, and moves of the state."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from piper.cli.reports import LengthStepReport, MoveReport
from piper.ir.format import seconds, size, table_of
from piper.simulate.prices import Prices
from piper.simulate.simulate import simulate

if TYPE_CHECKING:
    from piper.compiler import Program
    from piper.tuning.lengths import SimulatedMove


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStep:
    """A simulated step on batches of one length. Of devices it is the one with most."""

    length: int
    limit: int | None  # of the strategy that it has
    step: float
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSteps:
    """The steps of all lengths, and the moves of the state between them."""

    steps: tuple[LengthStep, ...]
    moves: "tuple[SimulatedMove, ...]"
    usable: float | None  # bytes of a device. None: not known

    @property
    def reports(self) -> tuple[list[LengthStepReport], list[MoveReport]]:
        """Return what `--json` prints of steps and of moves."""
        steps: list[LengthStepReport] = [
            {"length": one.length, "limit": one.limit, "step_s": one.step, "peak_bytes": one.peak}
            for one in self.steps
        ]
        moves: list[MoveReport] = [
            {
                "before": one.before,
                "after": one.after,
                "bytes": one.nbytes,
                "seconds": one.seconds,
                "peak_bytes": one.peak,
            }
            for one in self.moves
        ]
        return steps, moves


def lengths_of(program: "Program", prices: Prices) -> LengthSteps | None:
    """Simulate a step of each length of a job, and the moves between them. None: it has one strategy."""
    from piper.job import limit_of
    from piper.tuning.lengths import programs_by_length, simulated_moves

    if limit_of(program.job) is None:
        return None
    programs = programs_by_length(program)
    steps = []
    for length, one in programs.items():
        simulation = simulate(one.plans, one.outline, prices.costs)
        peak = max(memory.peak for memory in simulation.memories)
        limit = limit_of(one.job)
        steps.append(LengthStep(length=length, limit=limit, step=simulation.step, peak=peak))
    usable = min((each for one in programs.values() for each in prices.usable(one.plans)), default=None)
    moves = simulated_moves(programs, prices.costs)
    return LengthSteps(steps=tuple(steps), moves=tuple(moves), usable=usable)


def print_lengths(lengths: LengthSteps, console: Console) -> None:
    """Print the step of each length, the moves between them, and which of these do not fit."""
    console.print()
    console.print("Strategies by length", style="bold")
    table = table_of("length", "strategy up to", "step", "peak")
    for one in lengths.steps:
        table.add_row(str(one.length), str(one.limit), seconds(one.step), size(one.peak))
    console.print(table)
    if lengths.moves:
        console.print()
        console.print("Moves of the state before a step in another layout", style="bold")
        table = table_of("from", "to", "sent", "time", "peak")
        for move in lengths.moves:
            amounts = size(move.nbytes), seconds(move.seconds), size(move.peak)
            table.add_row(str(move.before), str(move.after), *amounts)
        console.print(table)
    if lengths.usable is None:
        return
    where = {f"batches of length {one.length}": one.peak for one in lengths.steps}
    where |= {f"a move from length {one.before} to {one.after}": one.peak for one in lengths.moves}
    for what, peak in where.items():
        if peak > lengths.usable:
            held = f"a device would hold {size(peak)}, and may use {size(lengths.usable)}"
            console.print(f"Does not fit: in {what} {held}", markup=False)
