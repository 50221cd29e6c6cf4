"""What the page says of clocks that disagree, on hand-made times."""

from dataclasses import replace

from piper.plan.instr import Instr
from piper.plan.plan import Plan, Plans
from piper.simulate.account import Span, Timeline, account_of
from piper.simulate.simulate import Simulation
from piper.view.cells import Cell, Pipeline
from piper.view.facts import planned_and_measured, two_idles
from piper.view.provenance import Subject
from tests.chain import chain

INSTRS = (
    Instr(op="compute", node="F[PP=0]", stream="compute"),
    Instr(op="send", node="transfer", stream="send", comm="0>1", nbytes=8),
)
PIPELINE = Pipeline(
    title="t",
    names=("a", "b"),
    rows=tuple((Cell(start=s, cost=3, phase="F", stage=s, part=(0,)),) for s in (0, 1)),
)


def timeline(*spans: tuple[float, float]) -> Timeline:
    return Timeline(devices=(0,), spans=tuple(Span(start=start, end=end) for start, end in spans))


def subject(devices: tuple[int, ...] = (0, 1), **more: object) -> Subject:
    """A step of 10 ms: 6 ms of computing, then 3 ms of sending, of which computing hides 1 ms."""
    plan = Plan(devices=devices, instrs=INSTRS, slots={}, residents={})
    planned = timeline((0, 0.006), (0.005, 0.008))
    return Subject(
        title="t",
        outline=chain(1),
        origins={},
        plans=Plans(plans=(plan,), comms={}, buckets={}, seed=1.0, weighted=False),
        planned=Simulation(
            step=0.01,
            timelines=(planned,),
            accounts=(account_of(plan, planned, 0.01),),
            memories=(),
            path=(),
        ),
        usable=(None,),
        clock="h100",
        **more,  # type: ignore[arg-type]
    )


def test_idle_in_units_and_in_simulated_time_are_explained_together() -> None:
    """Of four units a row computes three; of 10 ms a device computes 6 and only sends for 2."""
    assert two_idles(subject(), PIPELINE) == (
        "In units a backward takes twice a forward and transfers take nothing: the schedule alone leaves "
        "devices idle for 25 %. In the simulated time of h100 they are idle for 40 %: 20 % in communication "
        "that no computing hides, the rest while they wait for passes of other devices, which are not all "
        "equally long."
    )
    assert two_idles(subject(devices=(0,)), PIPELINE) == ""


def test_a_measured_step_is_compared_part_by_part_with_the_planned_one() -> None:
    """The run takes 20 ms: 8 ms of computing, then 9 ms of sending, and 3 ms in which nothing runs."""
    run = subject(measured={0: timeline((0.003, 0.011), (0.011, 0.02))}, on="inline")
    assert planned_and_measured(run) == (
        "Measured 20 ms, planned 10 ms: 2 times. On average over 1 measured device: computing 8 ms (planned "
        "6 ms); communication that no computing hides 9 ms (planned 2 ms); waiting and gaps 3 ms (planned "
        "2 ms). Most of the difference is communication that no computing hides. The plan takes its times "
        "from h100 and assumes that each device has its processor to itself and that the host is never "
        "late. Here the devices are threads of one process, which share cores and the interpreter's lock."
    )
    assert planned_and_measured(replace(run, on="")).endswith("the host is never late.")
    assert planned_and_measured(subject()) == ""
