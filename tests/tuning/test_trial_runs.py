"""Candidates that run on this machine, in turns."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch

import piper
from piper import strategies
from piper.compiler import Program
from piper.errors import ConfigError, WorkerError
from piper.run.run import Run
from piper.simulate.cluster import load_cluster
from piper.tuning import trial_runs
from piper.tuning.choice import StrategyChoice, own_strategy
from piper.tuning.evaluate import Evaluation
from piper.tuning.result import Tuned
from piper.tuning.space import Space
from piper.tuning.trial_runs import (
    Step,
    TrialRun,
    TrialRuns,
    Turns,
    fit_together,
    margin_of,
    ordered,
    run_candidates,
)
from piper.workers.transport.fork_server import ForkServer
from tests.tuning.models import JOB, tower


def evaluation(step: float, devices: int = 2, peak: int = 100) -> Evaluation:
    return Evaluation(
        choice=StrategyChoice(ranks=1, replicas=devices, rows=8, microbatches=1, sizes=(4,)),
        strategy=tuple(strategies.ddp(devices)),
        step=step,
        peak=peak,
        rank_peaks=(peak,),
        busy=step,
        exposed=0.0,
        bound=0.0,
    )


@dataclass(slots=True)
class Machine:
    """Runs whose steps take the seconds that they are given, one after another; then the last again."""

    seconds: list[list[float]]
    now: float = 0.0
    taken: list[int] = field(default_factory=list)  # whose step it was
    started: list[int] = field(default_factory=list)
    servers: list[ForkServer] = field(default_factory=list)  # that were started
    running: int = 0
    most: int = 0  # runs at one time
    instead: dict[int, BaseException] = field(default_factory=dict)  # by the number of a step

    def clock(self) -> float:
        return self.now

    @contextmanager
    def serve(self) -> Iterator[ForkServer]:
        """Stand for a fork server: none may run when it starts, and none when it ends."""
        assert not self.running
        self.servers.append(cast(ForkServer, object()))
        yield self.servers[-1]
        assert not self.running

    @contextmanager
    def start(self, one: int, forks: ForkServer) -> Iterator[Step]:
        assert forks is self.servers[-1]
        self.started.append(one)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield partial(self.step, one)
        finally:
            self.running -= 1

    def step(self, one: int) -> None:
        number, left = len(self.taken), self.seconds[one]
        self.taken.append(one)
        if number in self.instead:
            raise self.instead[number]
        self.now += left.pop(0) if len(left) > 1 else left[0]

    def turns(self, *, together: bool = True) -> Turns:
        starts = [partial(self.start, one) for one in range(len(self.seconds))]
        return Turns(starts=starts, together=together, clock=self.clock, serve=self.serve)


def test_runs_take_turns_in_changing_order_and_warm_steps_do_not_count() -> None:
    machine = Machine([[3.0, 3.0, 0.25], [2.0, 2.0, 0.5], [1.0, 1.0, 0.75]])
    turns = machine.turns()
    turns.take()
    assert turns.times == [[[0.25] * 3] * 5, [[0.5] * 3] * 5, [[0.75] * 3] * 5]
    assert (machine.started[:6], machine.most, len(machine.servers)) == ([0, 1, 2, 1, 2, 0], 3, 5)
    assert [machine.started.count(one) for one in range(3)] == [5, 5, 5]
    starts = [machine.taken[first : first + 15] for first in range(0, 75, 15)]
    assert [start[:6] for start in starts[:2]] == [[0, 0, 1, 1, 2, 2], [1, 1, 2, 2, 0, 0]]
    rounds = [tuple(start[first : first + 3]) for start in starts for first in range(6, 15, 3)]
    assert all(sorted(one) == [0, 1, 2] for one in rounds)
    assert len(set(rounds)) > 3


@pytest.mark.parametrize(
    ("seconds", "starts", "rounds"),
    [
        (2.0, 5, 3),  # 20 seconds for each start
        (3.5, 5, 2),  # the second round begins after 21 seconds, and the third would after 28
        (4.5, 5, 1),
        (6.0, 4, 1),  # 144 seconds after four of them
        (20.0, 3, 1),
    ],
)
def test_long_steps_take_fewer_rounds_and_starts(seconds: float, starts: int, rounds: int) -> None:
    turns = Machine([[seconds], [seconds]]).turns()
    turns.take()
    assert turns.times == [[[seconds] * rounds] * starts] * 2


def test_runs_that_do_not_fit_together_are_started_for_each_turn() -> None:
    machine = Machine([[5.0, 5.0, 1.0], [2.0]])
    turns = machine.turns(together=False)
    turns.take()
    assert turns.times == [[[1.0] * 4] * 3, [[2.0] * 4] * 3]
    assert (machine.started, machine.most, len(machine.servers)) == ([0, 1, 1, 0, 0, 1], 1, 3)


def starts_of(*medians: float) -> list[list[float]]:
    """The steps of a run whose starts have these medians."""
    return [[middle - 0.01, middle, middle + 0.5] for middle in medians]


def test_what_starts_differ_by() -> None:
    assert margin_of([]) == margin_of([starts_of(1.0, 2.0)]) == margin_of([starts_of(1.0)] * 2) == 0
    assert margin_of([starts_of(1.0, 1.0, 1.0), starts_of(3.0, 3.0, 3.0)]) == 0
    # Each of two runs has a start that is 10 % slower than its other one: half of that from either mean.
    assert margin_of([starts_of(1.05, 0.95), starts_of(1.9, 2.1)]) == pytest.approx(0.1)
    # In four starts the same deviations are known better, and their means differ by less.
    twice = [starts_of(1.05, 0.95) * 2, starts_of(1.9, 2.1) * 2]
    assert margin_of(twice) == pytest.approx(0.05 * (8 / 3 / 2) ** 0.5)


def test_a_start_in_which_everything_is_slow_says_nothing() -> None:
    assert margin_of([starts_of(1.0, 2.0, 1.0), starts_of(3.0, 6.0, 3.0)]) == pytest.approx(0)


def run_of(predicted: float, *medians: float) -> TrialRun:
    return TrialRun(candidate=evaluation(predicted), starts=tuple(map(tuple, starts_of(*medians))))


def test_equally_fast_runs_are_in_the_order_of_their_predictions() -> None:
    slow, late, early = run_of(1.0, 1.2), run_of(3.0, 1.0), run_of(2.0, 1.04)
    failed = TrialRun(candidate=evaluation(0.5), starts=(), failed="lost")
    runs = [slow, failed, late, early]
    assert ordered(runs, 0.05) == (early, late, slow, failed)
    assert ordered(runs, 0.03) == (late, early, slow, failed)
    assert ordered(runs, 0.3) == (slow, early, late, failed)
    found = TrialRuns(runs=ordered(runs, 0.05), load=1.0, margin=0.05)
    assert found.equals == (early, late)
    assert found.note == (
        "2 are equally fast: their medians lie within 5.0 %, and starts of one strategy differ by as much. "
        "The shortest by prediction is the best"
    )
    assert TrialRuns(runs=ordered(runs, 0.03), load=1.0, margin=0.03).note == ""


def test_one_start_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are equally fast, the one that is predicted to be slower has one start that is faster."""
    warm = [1.0, 1.0]
    lucky = [*warm, *[0.92] * 3, *warm, *[1.0] * 3, *warm, *[1.01] * 3, *warm, *[0.99] * 3, *warm, 1.0]
    other = [*warm, *[1.01] * 3, *warm, *[1.0] * 3, *warm, *[1.0] * 3, *warm, *[1.02] * 3, *warm, 1.01]
    found = trial(Machine([other, lucky]), monkeypatch)
    assert [run.candidate.step for run in found.runs] == [1.0, 2.0]
    assert [run.step for run in found.runs] == pytest.approx([1.01, 1.0])
    assert 0.01 < found.margin < 0.04


def trial(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> TrialRuns:
    """Run two candidates, the first predicted to be faster."""
    monkeypatch.setattr(trial_runs, "stretch", lambda: 1.0)
    monkeypatch.setattr(trial_runs, "perf_counter", machine.clock)
    starts = machine.turns().starts
    candidates = [evaluation(1.0 + one) for one in range(len(starts))]
    monkeypatch.setattr(trial_runs, "Turns", partial(Turns, clock=machine.clock, serve=machine.serve))
    return run_candidates(candidates, starts, together=True)


def test_the_fastest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trial(Machine([[3.0], [2.0, 2.0, 1.0, 8.0, 2.0]]), monkeypatch)
    assert [(run.candidate.step, run.step) for run in found.runs] == [(2.0, 2.0), (1.0, 3.0)]
    assert found.warning == ""


def failure(kind: str = "lost") -> WorkerError:
    return WorkerError(f"the worker is {kind}", by="device 0", hint="look")


@pytest.mark.parametrize("step", [1, 6])  # while it warms up, and in a turn
def test_a_candidate_that_fails_is_not_chosen(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    machine = Machine([[1.0], [2.0]], instead={step: failure()})
    found = trial(machine, monkeypatch)
    failed = machine.taken[step]
    assert [(run.candidate.step, bool(run.times)) for run in found.runs] == [
        (2.0 - failed, True),
        (1.0 + failed, False),
    ]
    assert found.runs[1].failed == "device 0: the worker is lost"


def test_all_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine([[1.0], [2.0]], instead={0: failure("lost"), 1: failure("late")})
    with pytest.raises(WorkerError, match="device 0: the worker is lost"):
        trial(machine, monkeypatch)


@pytest.mark.parametrize(("step", "steps", "best"), [(1, 0, 1.0), (5, 0, 1.0), (6, 1, 2.0), (9, 2, 2.0)])
def test_ctrl_c_gives_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, step: int, steps: int, best: float
) -> None:
    machine = Machine([[3.0], [2.0]], instead={step: KeyboardInterrupt()})
    found = trial(machine, monkeypatch)
    assert found.interrupted
    assert (len(found.runs[0].times), found.runs[0].candidate.step) == (steps, best)


def test_other_work_is_named() -> None:
    found = TrialRuns(runs=(), load=1.3)
    assert found.warning == (
        "other work slowed this machine down: a loop took 1.30 times its best, so candidates that are close may be "
        "in the wrong order"
    )


def test_candidates_run_together_if_they_fit() -> None:
    few, cpu = [evaluation(1.0, peak=2**20)] * 3, load_cluster("cpu")
    assert fit_together(few, cpu, 2, limit=1)  # the limit of a device is not the memory of the host
    assert not fit_together([evaluation(1.0, peak=2**50)], cpu, 2, limit=2**60)
    h100 = replace(load_cluster("h100"), context=10.0)
    assert fit_together([evaluation(1.0)] * 3, h100, 2, limit=330)
    assert not fit_together([evaluation(1.0)] * 3, h100, 2, limit=329)


def with_cards(monkeypatch: pytest.MonkeyPatch, cards: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)


@pytest.mark.parametrize(
    ("cards", "cluster", "devices", "what"),
    [
        (
            0,
            "h100",
            2,
            "candidates for h100 cannot be measured on this machine\n  cluster: GPUs\n  here:    no GPU",
        ),
        (
            1,
            "cpu",
            1,
            "candidates for cpu cannot be measured on this machine\n  cluster: processes of a host",
        ),
        (
            2,
            "h100",
            4,
            "candidates for 4 devices cannot be measured on this machine\n  asked: 4\n  here:  2 GPUs",
        ),
    ],
)
def test_another_machine_is_refused_before_the_search(
    monkeypatch: pytest.MonkeyPatch, cards: int, cluster: str, devices: int, what: str
) -> None:
    with_cards(monkeypatch, cards)
    with pytest.raises(ConfigError) as raised:
        piper.tune(JOB, cluster, devices, measure=2)
    assert str(raised.value).startswith(f"tune --measure: {what}")


@pytest.mark.parametrize(("cards", "cluster", "devices"), [(0, "cpu", 64), (2, "h100", 2)])
def test_this_machine_is_measured(
    monkeypatch: pytest.MonkeyPatch, cards: int, cluster: str, devices: int
) -> None:
    with_cards(monkeypatch, cards)
    trial_runs.check_runs_here(load_cluster(cluster), devices)


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(monkeypatch, 0)
    world = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="its process belongs to a job of torchrun"):
        piper.tune(JOB, "cpu", 2, measure=2)


def test_how_many_is_a_whole_number() -> None:
    with pytest.raises(ConfigError, match="measure=0"):
        piper.tune(JOB, "cpu", 2, measure=0)


def test_the_strategy_that_a_job_has() -> None:
    assert own_strategy(JOB, 2) is None
    four = replace(JOB, strategy=strategies.ddp(4))
    assert own_strategy(four, 2) is None
    assert own_strategy(four, 4) == strategies.ddp(4)
    either = replace(JOB, strategy=lambda devices: strategies.ddp(len(devices)), elastic=(2, 3))
    assert [own_strategy(either, devices) for devices in (2, 3, 4)] == [
        strategies.ddp(2),
        strategies.ddp(3),
        None,
    ]


def tuned(runs: tuple[TrialRun, ...], evaluated: tuple[Evaluation, ...], margin: float = 0.0) -> Tuned:
    return Tuned(
        best=runs[0].candidate,
        evaluated=evaluated,
        discarded=(),
        limit=1000,
        machine="cpu",
        devices=2,
        lowest=float("inf"),
        recorded=(8,),
        interrupted=False,
        seconds=1.0,
        trial=TrialRuns(runs=runs, load=1.0, margin=margin),
    )


def test_a_table_has_measured_before_predicted_steps() -> None:
    first, second, third, fourth, fifth = evaluated = tuple(
        evaluation(step) for step in (1.0, 2.0, 3.0, 4.0, 2.0)
    )
    found = tuned(
        (
            TrialRun(candidate=second, starts=((2.5,), (2.0, 9.0))),
            TrialRun(candidate=first, starts=((3.0,),)),
            TrialRun(candidate=third, starts=(), failed="device 0: the worker is lost"),
        ),
        evaluated,
    )
    assert list(map(id, found.ranked)) == list(map(id, (second, first, fifth, third, fourth)))
    assert [found.measured(one) for one in found.ranked] == [2.5, 3.0, None, None, None]
    assert [found.reason(one) for one in found.ranked] == [
        "best, measured",
        "measured 1.200 of the best",
        "not measured",
        "failed when it was measured: device 0: the worker is lost",
        "computes 2 s longer",
    ]
    assert found.step_text == "2.5 s (measured; 2 s predicted)"


def test_a_table_says_which_are_equally_fast() -> None:
    runs = (run_of(1.0, 2.1), run_of(2.0, 2.0), run_of(3.0, 4.2))
    found = tuned(runs, tuple(run.candidate for run in reversed(runs)), margin=0.06)
    assert found.ranked == [run.candidate for run in runs]
    assert [found.reason(one) for one in found.ranked] == [
        "best by prediction of 2 that are equally fast",
        "measured 0.952 of the best: equally fast, as far as starts tell",
        "measured 2.000 of the best",
    ]


TWO = Space(ranks=(1,), rows=(8,), zeros=(0, 1, 2), recompute=Space().recompute[:1])


def test_the_best_of_a_search_is_the_one_measured_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    server = cast(ForkServer, object())

    @contextmanager
    def launched(program: Program, *, forks: ForkServer) -> Iterator[Run]:
        assert forks is server
        ran.append(program.job.strategy)
        with piper.launch(program, on="inline") as run:
            yield run

    def slower_first(turns: Turns) -> None:
        """Take a step of each for real, and find the first the slowest."""
        for start in turns.starts:
            with start(server) as step:
                step()
        turns.times = [[[3.0]], [[1.0]], [[2.0]]]

    monkeypatch.setattr("piper.tuning.tune.launch_local", launched)
    monkeypatch.setattr(trial_runs, "stretch", lambda: 1.0)
    monkeypatch.setattr(Turns, "take", slower_first)
    own = strategies.ddp(2, microbatches=4)
    job = replace(
        tower(), strategy=lambda devices: strategies.ddp(len(devices), microbatches=4), elastic=(1, 2)
    )
    seen: list[tuple[int, int]] = []
    found = piper.tune(
        job,
        "cpu",
        2,
        space=TWO,
        front=False,
        workers=1,
        measure=2,
        progress=lambda search, one: seen.append((search.wanted, search.measuring)),
    )
    assert seen == [*[(2, 0)] * 4, (2, 3)]
    assert found.trial is not None
    by_prediction = sorted(found.evaluated, key=lambda one: one.step)
    assert ran == [list(one.strategy) for one in (*by_prediction[:2], by_prediction[-1])]
    assert ran[2] == own
    assert found.best is by_prediction[1]
    assert found.strategy == ran[1]
    assert found.ranked[:3] == [by_prediction[1], by_prediction[-1], by_prediction[0]]
    assert found.complete
    json.loads(found.json)


RECIPE = """
from dataclasses import replace
from piper import strategies
from piper.compiler import Program
from tests.tuning.models import tower

def job():
    return replace(tower(), strategy=strategies.ddp(2, microbatches=8))
"""


def piper_tune(folder: Path, *words: str, before: str = "") -> "subprocess.Popen[str]":
    (folder / "net.py").write_text(RECIPE, encoding="utf-8")
    asked = ["tune", "net.py:job", "--cluster", "cpu", "--devices", "2", "--trials", "4", "--json", *words]
    return subprocess.Popen(
        [sys.executable, "-c", f"{before}\nfrom piper.cli import main\nmain()", *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,  # a process group of its own
    )


TWO_STARTS = "from piper.tuning import trial_runs; trial_runs.STARTS = 2"


@pytest.mark.slow
def test_processes_of_this_machine_are_measured(tmp_path: Path) -> None:
    started = piper_tune(tmp_path, "--measure", "2", "--out", "best.json", before=TWO_STARTS)
    printed, errors = started.communicate(timeout=110)
    assert (started.returncode, errors) == (0, "")
    found = json.loads(printed)
    steps = [one["measured_s"] for one in found["ranked"]]
    assert all(step > 0 for step in steps[:3])
    assert steps[0] <= min(steps[:3]) * (1 + found["margin"])
    assert not any(steps[3:])
    assert found["best"]["measured_s"] == steps[0]
    assert found["best"]["label"] == found["ranked"][0]["label"]
    assert found["best"]["strategy"] == json.loads((tmp_path / "best.json").read_text(encoding="utf-8"))
    assert "the given strategy" in [one["label"] for one in found["ranked"][:3]]
    assert found["load"] >= 1


TERMINAL = """
import os, signal
from piper.tuning.trial_runs import Turns

turn = Turns._turn
taken = []

def interrupted(turns, one, step):
    taken.append(one)
    if len(taken) == 8:
        os.killpg(0, signal.SIGINT)  # what a terminal does
    turn(turns, one, step)

Turns._turn = interrupted
"""


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_ends_all_runs(tmp_path: Path) -> None:
    started = piper_tune(tmp_path, "--measure", "3", before=TERMINAL)
    printed, errors = started.communicate(timeout=110)
    assert (started.returncode, errors) == (0, "")
    found = json.loads(printed)
    assert found["interrupted"]
    assert found["best"]["measured_s"] > 0
    with pytest.raises(ProcessLookupError):
        os.killpg(started.pid, 0)
