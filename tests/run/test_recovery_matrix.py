"""Failures at every kind of instruction and during the copy, under many strategies: always the same bits."""

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import islice

import pytest
import torch
from torch import Tensor

from piper.checkpoint.save import Copied
from piper.compiler import Program, compile
from piper.directives import Directive, protect
from piper.ir.select import at
from piper.job import strategy_of
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.plan.protected import survival
from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.run.run_events import Event
from piper.runtime.context import Bound
from piper.runtime.worker import Options
from piper.workers.blame import Watcher
from piper.workers.results import StepResult
from piper.workers.transport.version_sections import HEAD, SectionWriter
from tests.covering import Choices, covering, selected
from tests.run.test_protect import held_bytes
from tests.runtime import divided
from tests.runtime.grid import Cell, batches, job, strategy
from tests.runtime.sharing import Shared
from tests.workers.sabotage import BrokenError

ONE = partial(Cell, rows=1)  # slices as in `tests/runtime/test_matrix.py`, whose captures these tests share
CELLS = [
    *(ONE(case="mlp", schedule="1f1b", dp=2, zero=zero) for zero in range(4)),
    *(ONE(case="mlp", schedule="1f1b", dp=2, zero=zero, clip=0.3) for zero in range(4)),
    *(ONE(case="convnet", schedule="none", dp=2, zero=zero) for zero in range(4)),
    *(ONE(case="dropout", schedule="zero-bubble", dp=2, zero=zero) for zero in range(4)),
    *(ONE(case="moe", schedule="none", dp=2, zero=zero, ways=2) for zero in (0, 1, 2, 3)),
    ONE(case="decoder", schedule="dualpipe-v", dp=1, zero=0, parts=4),
    ONE(case="sum_weight", schedule="interleaved-1f1b", dp=2, zero=1),
    ONE(case="frozen", schedule="none", dp=2, zero=2),
]
pytestmark = pytest.mark.timeout(600)
COPY = "half a copy"
MANY = 40  # batches: more than there are operations
Batches = Callable[[int], list[dict[str, Tensor]]]  # the first of all batches, as many as are asked for
Step = tuple[StepResult, dict[str, Tensor]]  # what it returns, and the state that it leaves


@dataclass
class Injector:
    """Fails once at the next instruction of a kind, or in the next copy, on a device."""

    armed: tuple[int, str] | None = None

    def fire(self, device: int, what: str) -> None:
        if self.armed == (device, what):
            self.armed = None
            raise BrokenError(what)


@pytest.fixture(scope="module")
def shared() -> Shared:
    """Share captures between tests, those of one model at a time."""
    return Shared()


@dataclass
class Undisturbed:
    """A run without failures, of one job at a time, that goes on as far as it is asked for.

    How the state is copied changes no number: one run serves all ways of copying, each of which must give its bits.
    """

    job: Hashable = None
    steps: Generator[Step, None, None] | None = None
    known: list[Step] = field(default_factory=list)

    def after(self, job: Hashable, program: Program, batches: Batches, count: int) -> list[Step]:
        """Return the result and the state after each of some first steps."""
        if job != self.job or self.steps is None:
            self.close()
            self.job, self.steps, self.known = job, undisturbed_steps(program, batches), []
        self.known += islice(self.steps, max(0, count - len(self.known)))
        return self.known[:count]

    def close(self) -> None:
        if self.steps is not None:
            self.steps.close()


def undisturbed_steps(program: Program, batches: Batches) -> Generator[Step, None, None]:
    with launch_inline(program) as run:
        for batch in batches(MANY):
            yield run.step(batch), run.state_dict()


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[Undisturbed]:
    made = Undisturbed()
    yield made
    made.close()


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Injector]:
    made, watch, write = Injector(), Watcher.watch, SectionWriter.write

    def watched(self: Watcher, place: int, ins: Instr, run: Bound) -> Bound:
        def act() -> None:
            made.fire(self.device, ins.op)
            run()

        return watch(self, place, ins, act)

    def written(self: SectionWriter, copied: Copied, text: bytes | None = None) -> None:
        if made.armed == (self.device, COPY):  # it is lost half-way
            HEAD.pack_into(self._memory(64), 0, 0, 10, 10, 0, 0)
        made.fire(self.device, COPY)
        write(self, copied, text)

    monkeypatch.setattr(Watcher, "watch", watched)
    monkeypatch.setattr(SectionWriter, "write", written)
    yield made


def targets(plans: Plans) -> list[tuple[int, str]]:
    """The last device that has an operation, for every operation; and two copies."""
    found: dict[str, int] = {}
    for plan in plans:
        for ins in plan.instrs:
            found[ins.op] = plan.devices[-1]
    ops = {device: {ins.op for ins in plan.instrs} for plan in plans for device in plan.devices}
    devices = [device for device in ops if plans.protection is None or "protect" in ops[device]]
    return [
        *((device, op) for op, device in sorted(found.items())),
        (devices[0], COPY),
        (devices[-1], COPY),
    ]


@dataclass
class Met:
    """The operations that have failed in this process, each with the choices of the trials in which it did.

    The operation that fails is one more axis of the matrix: it meets each choice once. A copy fails in every trial.
    """

    every: bool = False  # each operation fails in each trial
    pairs: set[tuple[str, tuple[str, Hashable]]] = field(default_factory=set)

    def wanted(self, aims: Iterable[tuple[int, str]], choices: Choices) -> list[tuple[int, str]]:
        """Return those of a trial's aims that are copies, or meet one of its choices for the first time."""
        return [
            (device, what)
            for device, what in aims
            if self.every or what == COPY or any((what, one) not in self.pairs for one in choices.items())
        ]

    def add(self, aims: Iterable[tuple[int, str]], choices: Choices) -> None:
        """Note that a trial has survived failures."""
        self.pairs |= {(what, one) for _, what in aims for one in choices.items()}


@pytest.fixture(scope="session")
def met(request: pytest.FixtureRequest) -> Met:
    return Met(every=any(item.get_closest_marker("exhaustive") for item in request.session.items))


WAYS: dict[str, list[Directive]] = {
    "between steps": [],
    "by the plan": [protect(at())],
    "copies": [protect(at(), copies=1, apart="device")],
}


Trial = tuple[Cell, str, str]  # a cell, a way of copying, a precision
Survives = Callable[[Cell, str, str], None]
SHORT = ONE(case="convnet", schedule="none", dp=2, zero=1)
DEFAULT: list[Trial] = [(SHORT, "between steps", "fp64"), (SHORT, "by the plan", "bf16")]
ALL: list[Trial] = [
    (cell, way, precision) for cell in CELLS for way in WAYS for precision in ("fp64", "bf16")
]
# To capture these in a second precision takes seconds. A precision decides which parameters have a master copy: trained ones
# in bf16, none in fp64. Small models have all of it, frozen parameters are tried in bf16.
ONE_PRECISION = {"moe": "fp64", "decoder": "fp64", "sum_weight": "fp64", "frozen": "bf16"}
CHEAP = [trial for trial in ALL if ONE_PRECISION.get(trial[0].case, trial[2]) == trial[2]]


def choices(trial: Trial) -> Choices:
    """Return what a trial chooses on each axis of the matrix."""
    cell, way, precision = trial
    return {"case": cell.case, "zero": cell.zero, "clip": cell.clip, "way": way, "precision": precision}


@cache
def chosen() -> list[Trial]:
    """Return trials in which every two choices meet that do not meet in the default run."""
    return covering(CHEAP, choices, given=DEFAULT)


@pytest.fixture
def survives(injector: Injector, shared: Shared, undisturbed: Undisturbed, met: Met) -> Survives:
    """Runs a trial, which fails where recovery does not give the numbers of an undisturbed run."""
    return partial(assert_trial_survives, injector=injector, shared=shared, undisturbed=undisturbed, met=met)


@pytest.mark.parametrize(("cell", "way", "precision"), DEFAULT)
def test_a_failure_at_every_instruction(cell: Cell, way: str, precision: str, survives: Survives) -> None:
    survives(cell, way, precision)


@pytest.mark.parametrize(
    ("cell", "way", "precision"), selected([trial for trial in ALL if trial not in DEFAULT], chosen())
)
def test_failures_under_every_strategy(cell: Cell, way: str, precision: str, survives: Survives) -> None:
    survives(cell, way, precision)


def assert_trial_survives(
    cell: Cell,
    way: str,
    precision: str,
    injector: Injector,
    shared: Shared,
    undisturbed: Undisturbed,
    met: Met,
) -> None:
    scheduler = partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=10)
    made = job(cell, precision=precision, scheduler=scheduler)
    with shared.capturing():
        program = compile(replace(made, strategy=[*strategy(cell), *WAYS[way]]))
    chosen = choices((cell, way, precision))
    assert_survives((cell, precision), chosen, program, partial(batches, cell), injector, undisturbed, met)


DIVIDED = ["tp2", "sp2", "tp2dp2z1", "tp2dp2z3", "tp2pp2", "cp2", "cp2zigzag", "tp2cp2dp2"]
LARGEST = (
    "tp2cp2dp2"  # eight devices: the matrix has it in one way, and strategies of two and four in the others
)


DIVIDED_WAYS = [(name, way) for name in DIVIDED for way in WAYS]


def choices_of_divided(trial: tuple[str, str]) -> Choices:
    """Return what a trial of divided chunks chooses on each axis of the matrix."""
    name, way = trial
    return {**asdict(divided.AXES[name]), "way": way}


@cache
def chosen_divided() -> list[tuple[str, str]]:
    """Return trials of divided chunks in which every two choices meet."""
    trials = [(name, way) for name, way in DIVIDED_WAYS if name != LARGEST or way == "by the plan"]
    return covering(trials, choices_of_divided)


@pytest.mark.parametrize(("name", "way"), selected(DIVIDED_WAYS, chosen_divided()))
def test_a_failure_at_every_instruction_of_divided_chunks(
    name: str, way: str, injector: Injector, shared: Shared, undisturbed: Undisturbed, met: Met
) -> None:
    made = divided.job("decoder", name)
    with shared.capturing():
        program = compile(replace(made, strategy=[*strategy_of(made), *WAYS[way]]))
    chosen = choices_of_divided((name, way))
    assert_survives(name, chosen, program, divided.batches, injector, undisturbed, met)
    if (report := survival(program.plans)) is not None:
        assert report.host_bytes == (2 * held_bytes(program, divided.batches(2)),)


def assert_survives(
    job: Hashable,
    choices: Choices,
    program: Program,
    batches: Batches,
    injector: Injector,
    undisturbed: Undisturbed,
    met: Met,
) -> None:
    """Check that failures at every kind of instruction leave the bits of an undisturbed run."""
    aims = met.wanted(targets(program.plans), choices)
    given = batches(len(aims) + 2)
    wanted = undisturbed.after(job, program, batches, len(given))
    _, state = wanted[-1]
    events: list[Event] = []
    with recovering(program, "inline", Options(), retries=10**6, notify=events.append) as run:
        got = []
        for number, batch in enumerate(given):
            if 0 < number <= len(aims):
                injector.armed = aims[number - 1]
            got.append(run.step(batch))
            if injector.armed is not None and injector.armed[1] == COPY:
                raise AssertionError("the copy did not fail")
        assert got == [result for result, _ in wanted]
        assert all(torch.equal(state[name], value) for name, value in run.state_dict().items())
    assert [e.event for e in events] == ["failure", "recovery"] * len(aims), "no step gave another result"
    met.add(aims, choices)


@pytest.mark.parametrize(
    ("trials", "of_trial"), [(ALL, choices), (DIVIDED_WAYS, choices_of_divided)], ids=["models", "divided"]
)
def test_every_operation_meets_every_choice(
    trials: list[Hashable], of_trial: Callable[[Hashable], Choices]
) -> None:
    aims, met = [(0, "send"), (1, "gather"), (1, COPY)], Met()
    failed: list[tuple[Hashable, str]] = []
    for trial in trials:
        wanted = met.wanted(aims, of_trial(trial))
        met.add(wanted, of_trial(trial))
        failed += [(trial, what) for _, what in wanted]
    assert [trial for trial, what in failed if what == COPY] == trials
    for operation in ("send", "gather"):
        where = [of_trial(trial).items() for trial, what in failed if what == operation]
        assert {one for found in where for one in found} == {
            one for trial in trials for one in of_trial(trial).items()
        }
        assert len(where) < len(trials) / 2
    assert Met(every=True, pairs=met.pairs).wanted(aims, of_trial(trials[0])) == aims
