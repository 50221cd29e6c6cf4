"""The cause of a failure is named, not its victims. A plan by hand: device 0 sends to 1, which sends to 2."""

from inspect import cleandoc

from piper.plan.instr import Instr
from piper.plan.plan import Comm, Plan, Plans
from piper.workers.blame import Failure, JobSnapshot, blame
from piper.workers.processes import ProcessStatus


def instr(op: str, node: str, comm: str | None = None) -> Instr:
    return Instr(op=op, node=node, stream=comm or "compute", comm=comm)  # type: ignore[arg-type]


def plan(device: int, *instrs: Instr) -> Plan:
    return Plan(devices=(device,), instrs=instrs, slots={}, residents={})


PLANS = Plans(
    plans=(
        plan(0, instr("compute", "F0"), instr("send", "h0", "0>1"), instr("total", "total", "all")),
        plan(
            1,
            instr("recv", "h0", "0>1"),
            instr("compute", "F1"),
            instr("send", "h1", "1>2"),
            instr("total", "total", "all"),
        ),
        plan(2, instr("recv", "h1", "1>2"), instr("compute", "F2"), instr("total", "total", "all")),
    ),
    comms={
        "0>1": Comm(name="0>1", kind="pairs", groups=((0, 1),)),
        "1>2": Comm(name="1>2", kind="pairs", groups=((1, 2),)),
        "all": Comm(name="all", kind="groups", groups=((0, 1, 2),)),
    },
    buckets={},
    seed=1.0,
    weighted=False,
)


def snapshot(
    *running: tuple[int, ...], ended: int | None = None, late: int | None = None, failed: int | None = None
) -> JobSnapshot:
    statuses = {
        device: ProcessStatus(
            process=100 + device,
            running=places,
            ended="the process was killed by SIGKILL" if device == ended else None,
        )
        for device, places in enumerate(running)
    }
    failures = [] if late is None else [Failure(device=late, kind="late", what="CommError: ...", trace="")]
    if failed is not None:
        failures.append(Failure(device=failed, kind="error", what="BrokenError: glass", trace=""))
    return JobSnapshot(
        plans=PLANS,
        origins=lambda node: [f"place #{node[-1]}"] if node.startswith("F") else [],
        timeout=5,
        statuses=statuses,
        failures=failures,
    )


def error(
    *running: tuple[int, ...], ended: int | None = None, late: int | None = None, failed: int | None = None
) -> str:
    return str(blame(snapshot(*running, ended=ended, late=late, failed=failed)))


def first_line(text: str) -> str:
    return text.partition("\n")[0]


def test_the_whole_text() -> None:
    assert error((2,), (1,), (0,), late=2) == cleandoc("""
        device 1 (process 101): F1 has not ended, and others waited 5 s for it
          at:      instruction 1, compute on stream compute: F1
          made by: place #1
          around:          0  recv           h0
                   -->     1  compute        F1
                           2  send           h1
                           3  total          total
          waiting: device 0 in total, device 2 in h1
          hint:    if this instruction is only slow, give launch a larger timeout
    """)


def test_those_who_wait_lead_to_the_one_they_wait_for() -> None:
    """Device 2 waits for 1, which waits for 0, which works."""
    assert first_line(error((0,), (0,), (0,), late=2)) == (
        "device 0 (process 100): F0 has not ended, and others waited 5 s for it"
    )


def test_a_dead_worker_comes_before_those_who_noticed() -> None:
    assert first_line(error((2,), (1,), (0,), ended=1, late=0)) == (
        "device 1 (process 101): the process was killed by SIGKILL"
    )


def test_a_worker_that_is_nowhere() -> None:
    assert error((2,), (3,), (), late=0) == cleandoc("""
        device 2 (process 102): nothing has run for 5 s
          at:      no instruction of its plan
          waiting: device 0 in total, device 1 in total
          hint:    if this instruction is only slow, give launch a larger timeout
    """)


def test_a_collective_that_all_have_come_to() -> None:
    assert first_line(error((2,), (3,), (2,), late=1)) == (
        "device 1 (process 101): waited 5 s in total, which never ended"
    )


def test_nobody_has_complained() -> None:
    assert first_line(error((2,), (1,), (0,))) == (
        "device 1 (process 101): F1 has not ended, and others waited 5 s for it"
    )


def test_a_worker_that_says_why_it_ends() -> None:
    assert (
        first_line(error((2,), (), (0,), ended=1, failed=1)) == "device 1 (process 101): BrokenError: glass"
    )


def test_the_others_are_at_work_until_they_need_the_one_that_failed() -> None:
    assert snapshot((0,), (1,), (0,), failed=1).broken
    assert snapshot((0,), (1,), (0,), failed=1).at_work, "device 0 is in F0"
    assert not snapshot((2,), (1,), (0,), failed=1).at_work
    assert not snapshot((2,), (1,), (0,), ended=1).at_work
    assert not snapshot((2,), (1,), (0,), late=0).broken, "nobody moves"
