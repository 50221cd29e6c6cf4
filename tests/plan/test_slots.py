"""The proof of slots on plans of a few instructions: each complaint, word for word, and what it must not say."""

from dataclasses import replace

import pytest

from piper.plan.instr import Instr
from piper.plan.plan import Comm, Plan, Plans, Slot
from piper.plan.prove import SlotProof, problems_of
from tests.slots import slot, slots

BYTES = Slot(nbytes=8)


def compute(node: str, reads: str = "", writes: str = "", frees: str = "", **fields: object) -> Instr:
    """An instruction of the compute stream; slots as words."""
    return instr("compute", node, "compute", reads, writes, frees, **fields)


def instr(
    op: str, node: str, stream: str, reads: str = "", writes: str = "", frees: str = "", **fields: object
) -> Instr:
    """An instruction; slots as words."""
    used = {"reads": reads, "writes": writes, "frees": frees}
    ids = {key: slots(*words.split()) for key, words in used.items()}
    return Instr(op=op, node=node, stream=stream, **ids, **fields)  # type: ignore[arg-type]


def complaints(*instrs: Instr, made: str = "a b", residents: str = "p") -> list[str]:
    """What the proof says of a plan, without the neighbours of each place."""
    plan = Plan(
        devices=(0,),
        instrs=instrs,
        slots=dict.fromkeys(slots(*made.split()), BYTES),
        residents=dict.fromkeys(slots(*residents.split()), BYTES),
    )
    return [problem.partition("\n")[0] for problem in SlotProof(plan).run()]


MAKE = compute("make", writes="a")
OTHER = "other"


def test_a_plan_without_problems() -> None:
    assert complaints(MAKE, compute("use", "a p", "b", "a"), compute("end", "b", "p", "b")) == []


@pytest.mark.parametrize(
    ("instrs", "wanted"),
    [
        ((compute("use", "a"),), ["use reads a.out0, which nothing has written"]),
        ((MAKE, compute("use", "a", frees="a"), compute("late", "a")), ["late reads a.out0, freed at 1"]),
        (
            (MAKE, compute("use", "a", frees="a"), compute("late", writes="a")),
            ["late writes a.out0, freed at 1"],
        ),
        (
            (MAKE, compute("use", "a", frees="a"), compute("late", frees="a")),
            ["late frees a.out0, freed at 1"],
        ),
        ((compute("use", frees="a"),), ["use frees a.out0, which nothing has written"]),
        ((compute("use", frees="p"),), ["use frees p.out0, which outlives the step"]),
        ((MAKE,), ["make writes a.out0, which is never freed"]),
        (
            (compute("make", writes="c"), compute("use", "c", frees="c")),
            ["make writes c.out0, which has no size"],
        ),
        ((compute("use", waits=(3,)),), ["use waits for event 3, which nothing before it signals"]),
        (
            (compute("one", signals=0), compute("two", signals=0)),
            ["two signals event 0, which is signalled already"],
        ),
        (
            (MAKE, instr("send", "give", OTHER, "a", frees="a")),
            [
                "give reads a.out0 without waiting for who writes it, at 0",
                "give frees a.out0 while make may still use it",
            ],
        ),
        (
            (
                compute("make", writes="a", signals=0),
                instr("send", "give", OTHER, "a", waits=(0,)),
                compute("end", frees="a"),
            ),
            ["end frees a.out0 while give may still use it"],
        ),
        (
            (
                compute("make", writes="a", signals=0),
                instr("send", "give", OTHER, "a", waits=(0,)),
                compute("again", writes="a"),
                instr("send", "give again", OTHER, "a", frees="a"),
            ),
            [
                "again writes a.out0 while give may still use it",
                "give again reads a.out0 without waiting for who writes it, at 2",
                "give again frees a.out0 while again may still use it",
            ],
        ),
    ],
)
def test_each_complaint(instrs: tuple[Instr, ...], wanted: list[str]) -> None:
    assert complaints(*instrs) == wanted


def test_events_carry_what_their_stream_knew() -> None:
    """A stream that waits for a second one knows what the second one knew of the first."""
    first = compute("make", writes="a", signals=0)
    second = instr("send", "relay", OTHER, waits=(0,), signals=1)
    assert complaints(first, second, instr("recv", "use", "third", "a", frees="a", waits=(1,))) == []
    late = instr("send", "relay", OTHER, signals=1)
    assert complaints(first, late, instr("recv", "use", "third", "a", frees="a", waits=(1,))) == [
        "use reads a.out0 without waiting for who writes it, at 0",
        "use frees a.out0 while make may still use it",
    ]


def test_an_event_says_nothing_of_what_its_stream_does_later() -> None:
    assert complaints(
        compute("early", signals=0), MAKE, instr("send", "give", OTHER, "a", frees="a", waits=(0,))
    ) == [
        "give reads a.out0 without waiting for who writes it, at 1",
        "give frees a.out0 while make may still use it",
    ]


def test_a_gather_may_not_run_ahead_of_computes_issued_before_it() -> None:
    gather = instr("gather", "whole", "gather", "p", "a")
    use = compute("use", "a", frees="a", waits=(1,))
    signalled = instr("gather", "whole", "gather", "p", "a", waits=(0,), signals=1)
    assert complaints(compute("busy", signals=0), signalled, use) == []
    assert complaints(compute("busy"), replace(gather, signals=1), use) == [
        "whole may run ahead of busy and fill the memory"
    ]


def test_a_backward_may_not_run_ahead_of_scatters_issued_before_it() -> None:
    def scattered(waits: tuple[int, ...]) -> list[str]:
        return complaints(
            compute("first", writes="a", signals=0),
            instr("reduce_scatter", "scatter", "reduce", "a", "p", "a", waits=(0,), signals=1, comm="c"),
            compute("second", writes="b", signals=2, waits=waits),
            instr("reduce_scatter", "scatter again", "reduce", "b p", "p", "b", waits=(2,), comm="c"),
        )

    assert scattered((1,)) == []
    assert scattered(()) == ["second may run ahead of scatter and fill the memory"]


def test_a_problem_shows_where_it_is() -> None:
    plan = Plan(devices=(0,), instrs=(MAKE,), slots={slot("a"): BYTES}, residents={})
    assert SlotProof(plan).run() == [
        "make writes a.out0, which is never freed\n-->     0  compute        make"
    ]


def between(left: Instr, right: Instr) -> list[str]:
    """What the whole proof says of two devices that do one thing each, over one communicator."""
    comm = Comm(name="c", kind="pairs", groups=((0, 1),))
    plans = tuple(
        Plan(devices=(i,), instrs=(ins,), slots={}, residents={slot("p"): BYTES})
        for i, ins in enumerate((left, right))
    )
    return list(problems_of(Plans(plans=plans, comms={"c": comm}, buckets={}, seed=1.0, weighted=False)))


def test_both_sides_of_a_transfer_agree_on_its_bytes_and_its_roles() -> None:
    send = instr("send", "t", "send", "p", comm="c", nbytes=8)
    recv = instr("recv", "t", "recv", writes="p", comm="c", nbytes=8)
    assert between(send, recv) == []
    assert between(send, replace(recv, nbytes=4)) == [
        "on c, operation 0: device 0 does transfer t of 8 bytes, device 1 does transfer t of 4 bytes"
    ]
    assert between(recv, send) == [
        "device 0 uses c but is not in it",
        "device 1 uses c but is not in it",
    ]
    assert between(send, compute("nothing")) == [
        "on c, operation 0: device 0 does transfer t of 8 bytes, device 1 does nothing"
    ]
