"""Whatever goes wrong in a worker, the driver gets one error that names the cause, and nothing is left running."""

import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from inspect import cleandoc
from pathlib import Path

import pytest
from torch import Tensor
from torch.optim import SGD, Optimizer

from piper.compiler import Program, compile
from piper.errors import LaunchError, WorkerError
from piper.run.elastic import MOVED
from piper.run.launch import launch_local
from piper.run.run import Run
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options
from piper.workers.local import LocalWorkerGroup
from piper.workers.processes import StopWatch
from piper.workers.serve import WorkerAnswers
from piper.workers.transport.channel import Listener, connect
from piper.workers.transport.fork_server import ForkServer
from tests import warm
from tests.runtime.grid import Cell, batches, job
from tests.workers import sabotage
from tests.workers.sabotage import Sabotaged

CELL = Cell(case="mlp", schedule="1f1b", dp=1, parts=2)  # stage 0 on device 0, stage 1 on device 1
BATCHES = batches(CELL, 3)
SHORT = Options(timeout=2.0)
LONG = Options(timeout=200.0)
SOON = 40.0  # far above what a loaded machine needs, far below the timeout of LONG


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with closing(ForkServer()) as made:
        yield made


@pytest.fixture(scope="module")
def program() -> Program:
    return compile(job(CELL))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def failing(program: ProgramLike, options: Options, forks: ForkServer) -> tuple[WorkerError, float]:
    """The error of a run that goes wrong in its second part, and how long it took; nobody may survive it."""
    with launch_local(program, options, forks) as run:
        pids = pids_of(run)
        begun = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            for batch in BATCHES:
                run.step(batch)
        took = time.monotonic() - begun
        assert not any(map(alive, pids)), "the others end with the run, before the block does"
        with pytest.raises(WorkerError, match="the workers have ended"):
            run.step(BATCHES[0])
    return caught.value, took


def pids_of(run: Run) -> list[int]:
    assert isinstance(run.session.group, LocalWorkerGroup)
    return list(run.session.group.processes.values())


def text(error: WorkerError) -> str:
    """What an error says, without what differs from run to run."""
    shown = re.sub(r"process \d+", "process N", str(error))
    shown = re.sub(r"grid\.py:\d+", "grid.py", shown)
    return re.sub(r"(waiting: device 0 in transfer\[PP=1\.din0\[MB=)\d", r"\1?", shown)


def told(program: Program, first: str, hint: str) -> str:
    """The whole text of an error about F[PP=1 MB=1], which waits for nobody."""
    plan = program.plans.of(1)
    place = next(i for i, ins in enumerate(plan.instrs) if ins.node == "F[PP=1 MB=1]")
    around = plan.around(place).replace("\n", "\n" + " " * 11)
    return "\n".join(
        [
            first,
            f"  at:      instruction {place}, compute on stream compute: F[PP=1 MB=1]",
            "  made by: replicate #1 (grid.py), split #2 (grid.py), order #4 (grid.py)",
            f"  around:  {around}",
            "  waiting: device 0 in transfer[PP=1.din0[MB=?] @1 -> @0]",
            f"  hint:    {hint}",
        ]
    )


def test_an_exception(program: Program, forks: ForkServer) -> None:
    error, took = failing(Sabotaged(program=program, arg="F PP=1", act=sabotage.fail), LONG, forks)
    assert text(error) == told(
        program,
        "device 1 (process N): BrokenError: the glass is broken",
        "the worker's own traceback is below; on='inline' runs the same plan under a debugger",
    )
    assert 'raise BrokenError("the glass is broken")' in "".join(error.__notes__)
    assert took < SOON, "nobody waits for the timeout"


def test_a_killed_worker(program: Program, forks: ForkServer) -> None:
    error, took = failing(Sabotaged(program=program, arg="F PP=1", act=sabotage.die), LONG, forks)
    assert text(error) == told(
        program,
        "device 1 (process N): the process was killed by SIGKILL",
        "look for what ended it: the system's log names a process killed for want of memory",
    )
    assert took < SOON, "nobody waits for the timeout"


def test_a_stopped_worker(program: Program, forks: ForkServer) -> None:
    error, took = failing(Sabotaged(program=program, arg="F PP=1", act=sabotage.stop), LONG, forks)
    assert text(error) == told(
        program,
        "device 1 (process N): the process is stopped by a signal",
        "let it continue with SIGCONT within seconds, or start again",
    )
    assert took < SOON, "nobody waits for the timeout"


def test_a_worker_that_is_stuck_in_its_own_work(program: Program, forks: ForkServer) -> None:
    error, took = failing(Sabotaged(program=program, arg="F PP=1", act=sabotage.sleep), SHORT, forks)
    assert text(error) == told(
        program,
        "device 1 (process N): F[PP=1 MB=1] has not ended, and others waited 2 s for it",
        "if this instruction is only slow, give launch a larger timeout",
    )
    assert took < SOON


def test_a_stuck_communication(program: Program, forks: ForkServer) -> None:
    error, took = failing(Sabotaged(program=program, arg="F PP=0", act=sabotage.mute), SHORT, forks)
    assert re.match(
        r"device \d \(process N\): waited 2 s in transfer\[.*\], which never ended\n"
        r"  at:      instruction \d+, recv on stream recv: transfer\[.*\]\n",
        text(error),
    )
    assert took < SOON


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_between_steps(
    program: Program, forks: ForkServer, how: signal.Signals
) -> None:
    with launch_local(program, SHORT, forks) as run:
        run.step(BATCHES[0])
        pids = pids_of(run)
        os.kill(pids[0], how)
        with pytest.raises(WorkerError) as caught:
            run.step(BATCHES[1])
    done = "was killed by SIGKILL" if how == signal.SIGKILL else "is stopped by a signal"
    # whether another worker already waits for it, which widens the column, is a matter of microseconds
    first = rf"device 0 \(process N\): the process {done}\n  at: +no instruction of its plan\n"
    assert re.match(first, text(caught.value))
    assert not any(map(alive, pids))


def test_a_worker_that_cannot_start(forks: ForkServer) -> None:
    home = os.getpid()
    made = compile(job(CELL, optimizer=lambda params: start_at(home, params)))
    with pytest.raises(WorkerError) as caught, launch_local(made, LONG, forks):
        pass
    assert re.fullmatch(
        cleandoc(r"""
        device \d \(process N\): optimizer \(test_failures.py:\d+\): optimizer\(\) failed: BrokenError: not in a worker
          at:   no instruction of its plan
          hint: the worker's own traceback is below; on='inline' runs the same plan under a debugger
        """),
        text(caught.value),
    )


def start_at(home: int, params: Iterable[Tensor]) -> Optimizer:
    if os.getpid() != home:
        raise sabotage.BrokenError("not in a worker")
    return SGD(params, lr=0.1)


def test_a_job_that_cannot_be_sent(forks: ForkServer) -> None:
    lock = threading.Lock()
    made = compile(job(CELL, optimizer=lambda params: SGD(params, lr=0.1 + lock.locked())))
    with pytest.raises(LaunchError) as caught, launch_local(made, LONG, forks):
        pass
    assert str(caught.value) == cleandoc("""
        launch: the job cannot be sent to its workers
          why:  TypeError: cannot pickle '_thread.lock' object
          hint: define operators in a module, keep locks and files out of optimizers, or use on='inline'
    """)


@pytest.mark.slow
def test_a_worker_that_stops_before_it_reads_a_long_message(program: Program, forks: ForkServer) -> None:
    """The driver does not wait in its send until the timeout."""
    with launch_local(program, LONG, forks) as run:
        run.step(BATCHES[0])
        pids = pids_of(run)
        os.kill(pids[0], signal.SIGSTOP)
        group, began = run.session.group, time.monotonic()
        assert isinstance(group, LocalWorkerGroup)
        with pytest.raises(
            WorkerError, match=r"^device 0 \(process \d+\): the process is stopped by a signal"
        ):
            group.ask(WorkerAnswers.buffers, {0: ["x" * 50_000_000]})
        assert time.monotonic() - began < SOON
    assert not any(map(alive, pids))


def test_a_worker_that_is_stopped_for_a_moment_is_not_lost(program: Program, forks: ForkServer) -> None:
    with launch_local(program, LONG, forks) as run:
        group = run.session.group
        assert isinstance(group, LocalWorkerGroup)
        group.stops = StopWatch(50.0)  # the timer below may be late
        os.kill(pids_of(run)[0], signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pids_of(run)[0], signal.SIGCONT)).start()
        assert run.step(BATCHES[0]).loss > 0


def idle_server() -> tuple[ForkServer, list[int]]:
    """A fork server without torch, and two of its workers."""
    made = ForkServer("tests.workers.idle", preload="socket")
    ends = [socket.socketpair() for _ in range(2)]
    pids = [made.fork([there.fileno()]) for _, there in ends]
    for here, there in ends:
        there.close()
        here.detach()  # it stays open as long as this process does
    return made, pids


def test_a_stopped_fork_server_does_not_delay_the_end() -> None:
    made, pids = idle_server()
    os.kill(made.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    made.wait(pids[:1], 100.0)
    made.close()
    assert time.monotonic() - began < SOON
    assert made.process.returncode == -signal.SIGKILL
    assert ended_soon([made.process.pid, *pids])


@pytest.mark.slow
def test_a_stopped_fork_server_starts_no_worker() -> None:
    made, _ = idle_server()
    os.kill(made.process.pid, signal.SIGSTOP)
    here, there = socket.socketpair()
    with here, there, pytest.raises(LaunchError) as caught:
        made.fork([there.fileno()])
    made.close()
    assert re.sub(r"\d+ is", "N is", str(caught.value)) == cleandoc("""
        launch: no process can be started
          why:  TimeoutError: process N is stopped by a signal
          hint: look at what the process printed; is the machine out of memory or processes?
    """)


def test_a_fork_server_outlives_the_thread_that_asked_for_it() -> None:
    """The system kills it with the thread that started it, which is therefore one of its own."""
    found: list[ForkServer] = []
    thread = threading.Thread(target=lambda: found.append(idle_server()[0]))
    thread.start()
    thread.join(50)
    time.sleep(0.5)
    assert alive(found[0].process.pid) and found[0].process.poll() is None
    found[0].close()


def test_more_than_a_thousand_descriptors() -> None:
    """`select` fails from the 1,024th descriptor on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 1400)), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    many = [os.dup(null) for _ in range(1100)]
    try:
        made, pids = idle_server()
        assert made.fileno() > 1024
        os.kill(pids[0], signal.SIGKILL)
        made.wait(pids[:1], 100.0)
        assert made.ended() == {pids[0]: -signal.SIGKILL}
        made.close()
        with closing(Listener("127.0.0.1", b"k" * 32, 5.0)) as listener, ThreadPoolExecutor(1) as threads:
            coming = threads.submit(connect, listener.address, b"k" * 32, 1, 5.0)
            arrived = listener.accept(5.0)
            assert arrived is not None and arrived[1].fileno() > 1024
            arrived[1].close()
            coming.result(5).close()
    finally:
        for descriptor in (null, *many):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ended_soon(pids: list[int]) -> bool:
    """Whether processes end within some seconds."""
    until = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


SCRIPT = """
import os, signal, socket, sys
from piper.workers.transport.channel import Listener, connect
from piper.workers.transport.fork_server import ForkServer
made = ForkServer("tests.workers.idle", preload="socket")
ends = [socket.socketpair() for _ in range(3)]
pids = [made.fork([there.fileno()]) for _, there in ends]
print(made.process.pid, *pids, flush=True)
os.kill(made.process.pid if sys.argv[1] == "server" else pids[0], signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("stopped", ["worker", "server"])
def test_workers_end_with_a_driver_that_is_killed(stopped: str) -> None:
    """Even those that are stopped."""
    done = warm.run(
        [sys.executable, "-c", SCRIPT, stopped],
        capture_output=True,
        timeout=50,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 4
    assert ended_soon(pids)


def test_nothing_shared_has_a_name(program: Program, forks: ForkServer) -> None:
    def names() -> set[str]:
        """Return what is in shared memory, without what tests of Ray and of elastic runs may have there."""
        found = {path.name for path in Path("/dev/shm").iterdir()}
        return {name for name in found if not name.startswith((MOVED, "plasma"))}

    before = names()
    with launch_local(program, LONG, forks) as run:
        run.step(BATCHES[0])
        assert names() <= before
