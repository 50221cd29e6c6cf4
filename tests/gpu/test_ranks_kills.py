"""Ranks of one GPU that are killed, stopped or asleep inside each kind of communication: recovered, and nothing is left.

By default these ranks take turns on the GPU: what NVIDIA's multi-process service does to other clients when one of them is
killed is not ours to promise. PIPER_RANKS_KILLS_MPS=1 tries it.
"""

import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from piper.compiler import Program, compile
from piper.job import Job
from piper.plan.plan import Plans
from piper.run.launch import launch_inline
from piper.run.run import Run
from piper.run.run_events import Event
from piper.workers.processes import gone
from piper.workers.transport.fork_server import ForkServer
from tests.gpu import mps
from tests.gpu.rank_process import Trap
from tests.gpu.rank_trials import ring
from tests.gpu.ranks import DEVICE, MARKS, ON_GPU, pids_of, rank_forks, recovering_ranks, told
from tests.runtime import divided
from tests.runtime.grid import Cell, batches, job

pytestmark = [*MARKS, pytest.mark.timeout(600), pytest.mark.xdist_group("ranks-kills")]
LEFT = 128 * 2**20  # bytes of the GPU that may differ: a rank takes more, by its context alone
ENDING = 20.0  # seconds in which the driver gives memory back
SAID = {
    "SIGKILL": "the process was killed by SIGKILL",
    "SIGSTOP": "the process is stopped by a signal",
}
KILLS = 100
SECONDS = 5.0  # to recovery, for 95 % of the kills


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A job, and the kinds of communication of it inside which ranks fail."""

    name: str
    kinds: tuple[str, ...]  # as `Instr.does` says
    job: Callable[[], Job]
    batches: Callable[[], list[dict[str, Tensor]]]


def of_cell(cell: Cell, *kinds: str) -> Victim:
    return Victim(name=str(cell), kinds=kinds, job=partial(job, cell), batches=partial(batches, cell, 4))


def of_divided(name: str, *kinds: str) -> Victim:
    return Victim(name=name, kinds=kinds, job=partial(divided.job, "decoder", name), batches=divided.batches)


VICTIMS = [
    of_cell(
        Cell(case="mlp", schedule="1f1b", dp=2, zero=3, clip=0.3),
        *("gather", "reduce_scatter", "send", "recv", "total"),
    ),
    of_cell(Cell(case="convnet", schedule="none", dp=2, zero=0), "all_reduce", "broadcast"),
    of_cell(Cell(case="moe", schedule="none", dp=2, zero=1, ways=2, rows=1), "counts", "exchange"),
    of_divided("sp2", "all_gather", "reduce_scatter"),
    Victim(name="ring", kinds=("shift", "shift_back"), job=ring(2).job, batches=divided.batches),
]


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traps") / "trap"


@pytest.fixture(scope="module")
def killed_forks(trap: Path) -> Iterator[ForkServer]:
    """A fork server of this module's ranks. Nothing of theirs disturbs those of other tests."""
    if ON_GPU and os.environ.get("PIPER_RANKS_KILLS_MPS") == "1":
        with mps.own_service() as clients, rank_forks(clients, trap=trap) as forks:
            yield forks
        return
    with rank_forks({}, trap=trap) as forks:
        yield forks


@pytest.fixture(autouse=True)
def disarmed(trap: Path) -> None:
    """Let no test run into the trap of a test before it."""
    trap.unlink(missing_ok=True)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that the ranks of a block give the GPU's memory back. Beside other tests nobody can tell whose it is."""
    if not ON_GPU or "PYTEST_XDIST_WORKER" in os.environ:
        yield
        return
    before = memory_free()
    yield
    until = time.monotonic() + ENDING
    while (free := memory_free()) < before - LEFT:
        assert time.monotonic() < until, f"{(before - free) / 2**20:.0f} MiB of the GPU are not given back"
        time.sleep(0.2)


def memory_free() -> int:
    """Return the bytes of the GPU that nobody has, but for what this process keeps for itself."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def device_with(plans: Plans, does: str) -> int:
    """Return the last device that has a kind of instruction."""
    found = [plan.devices[-1] for plan in plans for ins in plan.instrs if ins.does == does]
    assert found, f"no device has {does}"
    return max(found)


def aims(program: Program, victim: Victim) -> list[Trap]:
    """Return failures at each kind of communication: before a rank takes part in it, and once it does."""
    ways = (("SIGKILL", False), ("SIGKILL", True), ("SIGSTOP", True))
    return [
        Trap(device=device_with(program.plans, does), does=does, act=act, inside=inside)  # type: ignore[arg-type]
        for does in victim.kinds
        for act, inside in ways
    ]


def at_kind(program: Program, failure: Event) -> str | None:
    """Return the kind of the instruction that a failure names."""
    named = re.match(r"instruction (\d+), ", failure.instruction or "")
    if named is None or failure.device is None:
        return None
    return program.plans.of(failure.device).instrs[int(named[1])].does


def undisturbed(program: Program, given: list[dict[str, Tensor]]) -> list[float]:
    with launch_inline(program) as run:
        return [run.step(batch).loss for batch in given]


def assert_gone(pids: Mapping[int, int], events: list[Event]) -> None:
    """Check that processes have ended."""
    left = {device: pid for device, pid in pids.items() if not gone(pid)}
    assert not left, f"processes of devices {left} are left\n{told(events)}"


@pytest.mark.parametrize("victim", VICTIMS, ids=lambda victim: victim.name)
def test_kills_and_stops_inside_each_kind_of_communication(
    victim: Victim, killed_forks: ForkServer, trap: Path
) -> None:
    program = compile(victim.job(), device=DEVICE)
    failures = aims(program, victim)
    given = [*islice(cycle(victim.batches()), len(failures) + 2)]
    wanted = undisturbed(program, given)
    events: list[Event] = []
    with nothing_left(), recovering_ranks(program, killed_forks, events.append) as run:
        losses = [run.step(given[0]).loss]
        for aim, batch in zip(failures, given[1:], strict=False):
            before, pids = len(events), pids_of(run)
            aim.arm(trap)
            losses.append(run.step(batch).loss)
            assert not trap.exists(), f"no rank came to {aim}\n{told(events)}"
            new = events[before:]
            assert [event.event for event in new] == ["failure", "recovery"], f"{aim}\n{told(new)}"
            assert (new[0].device, new[0].what) == (aim.device, SAID[aim.act]), f"{aim}\n{told(new)}"
            assert at_kind(program, new[0]) == aim.does, f"{aim}\n{told(new)}"
            assert_gone(pids, new)
        losses.append(run.step(given[-1]).loss)
        pids = pids_of(run)
    assert_gone(pids, events)
    assert losses == pytest.approx(wanted, rel=1e-9), told(events)


@pytest.mark.parametrize("does", ["compute", "gather", "recv"])
def test_a_rank_that_hangs_is_named_and_replaced(killed_forks: ForkServer, trap: Path, does: str) -> None:
    """It neither ends nor is stopped, and the others wait for it.

    If it hangs in a computation, it is named. In a communication that others have begun too, one of them may be.
    """
    victim, stall = VICTIMS[0], 6.0
    program = compile(victim.job(), device=DEVICE)
    given = [*islice(cycle(victim.batches()), 4)]
    wanted = undisturbed(program, given)
    events: list[Event] = []
    aim = Trap(device=device_with(program.plans, does), does=does, act="sleep", inside=False)
    with nothing_left(), recovering_ranks(program, killed_forks, events.append, stall=stall) as run:
        losses = [run.step(batch).loss for batch in given[:2]]
        pids = pids_of(run)
        aim.arm(trap)
        began = time.monotonic()
        losses.append(run.step(given[2]).loss)
        took = time.monotonic() - began
        losses.append(run.step(given[3]).loss)
    assert_gone(pids, events)
    assert [event.event for event in events] == ["failure", "recovery"], told(events)
    met = {"gather": {"gather"}, "recv": {"send", "recv"}, "compute": {"compute"}}[does]
    assert at_kind(program, events[0]) in met, told(events)
    assert does != "compute" or events[0].device == aim.device, told(events)
    assert took < stall + 30, told(events)
    assert losses == pytest.approx(wanted, rel=1e-9), told(events)


@dataclass(slots=True)
class Kill:
    """A signal to a rank at some moment of the next step."""

    run: Run
    rng: random.Random
    at: float = 0.0  # by `time.monotonic`; 0: not yet

    def later(self, seconds: float) -> threading.Timer:
        """Kill a rank after so many seconds."""
        timer = threading.Timer(seconds, self.send)
        timer.start()
        return timer

    def send(self) -> None:
        pid = self.rng.choice([*pids_of(self.run).values()])
        self.at = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def quantile(times: list[float], share: float) -> float:
    """Return the smallest time that so many do not exceed."""
    return sorted(times)[max(0, -int(-share * len(times) // 1) - 1)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_kills_at_random_moments(killed_forks: ForkServer) -> None:
    cell = Cell(case="mlp", schedule="1f1b", dp=2, zero=3, clip=0.3)
    kills, rng = int(os.environ.get("PIPER_RANKS_KILLS", KILLS)), random.Random(17)
    program, every = compile(job(cell), device=DEVICE), cycle(batches(cell, 50))
    given: list[dict[str, Tensor]] = []
    losses: list[float] = []
    seconds: list[float] = []
    events: list[Event] = []
    with nothing_left(), recovering_ranks(program, killed_forks, events.append) as run:

        def train(steps: int) -> None:
            for _ in range(steps):
                given.append(next(every))
                losses.append(run.step(given[-1]).loss)

        train(3)
        began = time.monotonic()
        train(5)
        step = (time.monotonic() - began) / 5
        for number in range(kills):
            kill, before = Kill(run, rng), len(events)
            timer = kill.later(rng.uniform(0, 3 * step))
            until = time.monotonic() + 120
            while not any(event.event == "recovery" for event in events[before:]):
                train(1)
                assert time.monotonic() < until, (
                    f"kill {number} is not recovered from\n{told(events[before:])}"
                )
            timer.join()
            seconds.append(time.monotonic() - kill.at)
        train(2)
        pids = pids_of(run)
    assert_gone(pids, events)
    found = {share: quantile(seconds, share) for share in (0.5, 0.95, 1.0)}
    sys.stdout.write(
        f"\n{len(seconds)} kills of {len(pids)} ranks, seconds from the signal to the next step: "
        f"p50 {found[0.5]:.2f}, p95 {found[0.95]:.2f}, max {found[1.0]:.2f}; a step takes {step:.3f} s\n"
    )
    assert [event.event for event in events] == ["failure", "recovery"] * kills, told(events)
    assert losses == pytest.approx(undisturbed(program, given), rel=1e-9)
    assert not ON_GPU or found[0.95] <= SECONDS, told(events)
