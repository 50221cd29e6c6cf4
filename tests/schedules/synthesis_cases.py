"""What the tests of synthesis share: random pipelines, a clock of their own, and the compiler's answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import strategies as st

from piper import at, place, split
from piper.directives import Directive, apply
from piper.ir.chunk import CapturedModel, Chunk, Phase
from piper.ir.devices import Devices
from piper.ir.graph import start
from piper.plan.ops import Op
from piper.schedules import Memory, Placement, StageCosts
from piper.schedules.grid import Grid
from piper.simulate.costs import Talk, Unit
from piper.simulate.simulate import simulate
from tests.chain import chain
from tests.lower.lowering import lower

SECONDS = 5.0  # of one unit of cost to the compiler, whose rough cost is 2e14 flops and 5e10 bytes a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A pipeline to synthesise a schedule for."""

    costs: StageCosts
    placement: Placement
    microbatches: int
    memory: Memory | None


@st.composite
def cases(draw: st.DrawFn, ranks: int = 4, stages_per_rank: int = 3, microbatches: int = 6) -> Case:
    """Draw a pipeline: uneven times, hops below the shortest time, uneven bytes, a limit that may be tight."""
    count, per_rank = draw(st.integers(1, ranks)), draw(st.integers(1, stages_per_rank))
    stages = count * per_rank
    placement = draw(st.sampled_from([Placement.v, Placement.loop]))(count, per_rank)
    if draw(st.booleans()):
        placement = Placement(ranks=draw(st.permutations(placement.ranks)))
    time = st.one_of(st.just(1.0), st.floats(0.25, 3.0))

    def times() -> list[float]:
        return draw(st.lists(time, min_size=stages, max_size=stages))

    costs = StageCosts(
        forward=times(), inputs=times(), weights=times(), hop=draw(st.sampled_from([0.0, 0.0, 0.05, 0.25]))
    )

    def sizes() -> list[int]:
        return draw(st.lists(st.integers(0, 5), min_size=stages, max_size=stages))

    saved, carried = sizes(), sizes()
    memory = None
    if draw(st.booleans()):
        needed = [sum(saved[s] for s in placement.stages_of(rank)) for rank in range(count)]
        room = draw(st.integers(0, 3 * max(needed) + 1))
        memory = Memory(saved=saved, carried=carried, limit=[least + room for least in needed])
    return Case(
        costs=costs, placement=placement, microbatches=draw(st.integers(1, microbatches)), memory=memory
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """When each action of a grid runs, and the most bytes that each rank holds."""

    starts: dict[tuple[str, int, int], float]  # by phase, stage and microbatch
    end: float
    peaks: tuple[int, ...]


def replay(grid: Grid, case: Case) -> Replay:
    """Run a grid, action by action. Shares no code with the clock of the package."""
    costs, home = case.costs, case.placement.ranks
    assert isinstance(costs.hop, int | float)
    last = len(home) - 1
    arrived: dict[tuple[str, int, int], float] = {}
    starts: dict[tuple[str, int, int], float] = {}
    rows = [[action for group in row for action in group] for row in grid.rows]
    free, done = [0.0] * len(rows), [0] * len(rows)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while done[rank] < len(row):
                action = row[done[rank]]
                s, m, phase = action.stage, action.microbatch, action.phase
                needs = {"F": [("out", s - 1, m)], "BW": [("grad", s, m)]}.get(
                    phase, [("out", s, m), ("grad", s + 1, m)]
                )
                needs = [key for key in needs if 0 <= key[1] <= last]
                if any(key not in arrived for key in needs):
                    break
                hops = [0.0 if home[key[1]] == rank else costs.hop for key in needs]
                begin = max([free[rank], *(arrived[k] + h for k, h in zip(needs, hops, strict=True))])
                time = {
                    "F": costs.forward[s],
                    "BI": costs.inputs[s],
                    "BW": costs.weights[s],
                    "B": costs.inputs[s] + costs.weights[s],
                }[phase]
                starts[phase, s, m] = begin
                free[rank] = begin + time
                if phase != "BW":
                    arrived["out" if phase == "F" else "grad", s, m] = free[rank]
                done[rank] += 1
                progress = True
    assert [len(row) for row in rows] == done, "the grid stops before its end"
    return Replay(starts=starts, end=max(free), peaks=tuple(peak_of(row, case.memory) for row in rows))


def peak_of(row: Sequence[object], memory: Memory | None) -> int:
    """Return the most bytes that a row holds: an action's own bytes are there until it ends."""
    if memory is None:
        return 0
    held: dict[tuple[int, int], int] = {}
    peak = 0
    for action in row:
        s, m, phase = action.stage, action.microbatch, action.phase  # type: ignore[attr-defined]
        if phase == "F":
            held[s, m] = memory.saved[s]
        if phase == "BI":
            held[s, m] = max(memory.saved[s], memory.carried[s])
        peak = max(peak, sum(held.values()))
        if phase == "BI":
            held[s, m] = memory.carried[s]
        if phase in ("B", "BW"):
            del held[s, m]
    assert not held
    return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced(Unit):
    """The costs of a case, for the simulator: only transfers between stages take time besides passes."""

    costs: StageCosts

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        assert chunk is not None
        return self.costs.of(dict(chunk.tags)["PP"], phase)

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        assert isinstance(self.costs.hop, int | float)
        return Talk(latency=float(self.costs.hop) if op in ("send", "recv") else 0.0)


def outline_of(costs: StageCosts) -> CapturedModel:
    """A chain whose flops and bytes are in proportion to a case's times, as a captured model's would be."""
    assert isinstance(costs.hop, int | float)
    nbytes = int(costs.hop * SECONDS * 5e10)
    outline = chain(costs.stages)
    chunks = []
    for stage, chunk in enumerate(outline.chunks):
        phases = {
            phase: replace(spec, flops=int(costs.of(stage, phase) * SECONDS * 2e14))
            for phase, spec in chunk.phases.items()
        }
        chunks.append(
            replace(
                chunk,
                phases=phases,
                outputs=tuple(replace(value, nbytes=nbytes) for value in chunk.outputs),
                input_specs=tuple(replace(value, nbytes=nbytes) for value in chunk.input_specs),
            )
        )
    return replace(outline, chunks=tuple(chunks))


def compiled_step(case: Case, schedule: Sequence[Directive]) -> float:
    """Compile and prove a schedule for a chain of stages, and return the time of its simulated step.

    Every stage receives on a stream of its own, so that transfers wait for each other as little as they can.
    """
    outline = outline_of(case.costs)
    places: list[Directive] = [
        place(at(PP=stage), [rank], stream=f"into{stage}") for stage, rank in enumerate(case.placement.ranks)
    ]
    strategy = [*places, split(at(), parts=case.microbatches), *schedule]
    plans, _ = lower(apply(start(outline), strategy))  # lowering ends with the proof
    return simulate(plans, outline, Priced(costs=case.costs)).step


def transfers_meet(case: Case, found: Replay) -> bool:
    """Return whether an activation and a gradient travel to one stage at the same time: a stream takes turns."""
    hop, home = case.costs.hop, case.placement.ranks
    assert isinstance(hop, int | float)
    if not hop:
        return False
    for stage in range(len(home)):
        arriving = []
        for (phase, s, _), begin in found.starts.items():
            reader = s + 1 if phase == "F" else s - 1
            if phase != "BW" and reader == stage and home[s] != home[stage]:
                arriving.append(begin + case.costs.of(s, phase))  # type: ignore[arg-type]
        arriving.sort()
        if any(b - a < hop + 1e-9 for a, b in pairwise(arriving)):
            return True
    return False
