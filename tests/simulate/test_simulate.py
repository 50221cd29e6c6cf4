"""The clock: who waits for whom, what shares a link, what is live, and why the step is as long as it is."""

import time
from dataclasses import dataclass

import pytest

from piper import at, place, replicate, schedules, shard, split
from piper.directives import Directive, apply
from piper.ir.chunk import Chunk, Phase
from piper.ir.devices import Devices
from piper.ir.graph import start
from piper.ir.ids import Pass, SlotId
from piper.plan.instr import Instr
from piper.plan.memory_timeline import timeline as issue_order
from piper.plan.ops import COMMUNICATION, Op
from piper.plan.plan import Comm, Plan, Plans, Slot
from piper.simulate.account import Span, Timeline, memory_of
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Costs, Roofline, Talk, Unit, type_of
from piper.simulate.simulate import Simulation, simulate
from tests.chain import chain
from tests.lower.lowering import lower
from tests.simulate.pipelines import pipeline
from tests.slots import slot, slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Unit costs with communication that takes its bytes in seconds."""

    cores: int = 0
    node: int = 8
    period: int = 1
    latency: float = 0.0
    wake: float = 0.0
    copying: float = 0.0  # cores

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        return 1.0

    def touch(self, op: Op, nbytes: int) -> float:
        return 0.0

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        return Talk(latency=self.latency, seconds=float(nbytes), cores=self.copying)


def step(op: Op, node: str, stream: str, **fields: object) -> Instr:
    payload = Pass(phase="F", chunk=node) if op == "compute" else None
    return Instr(op=op, node=node, stream=stream, payload=payload, **fields)  # type: ignore[arg-type]


def job(*programs: list[Instr], comms: dict[str, tuple[Devices, ...]] | None = None) -> Plans:
    plans = tuple(
        Plan(devices=(number,), instrs=tuple(instrs), slots={}, residents={})
        for number, instrs in enumerate(programs)
    )
    kinds = {
        name: Comm(name=name, kind="pairs" if ">" in name else "groups", groups=groups)
        for name, groups in (comms or {}).items()
    }
    return Plans(plans=plans, comms=kinds, buckets={}, seed=1.0, weighted=False)


def run(plans: Plans, costs: Costs | None = None) -> tuple[Simulation, dict[str, tuple[float, float]]]:
    found = simulate(plans, None, costs or Timed())
    times = {
        f"{ins.op} {ins.node}": (span.start, span.end)
        for plan, timeline in zip(plans, found.timelines, strict=True)
        for ins, span in zip(plan.instrs, timeline.spans, strict=True)
    }
    return found, times


def test_a_stream_runs_in_order_and_streams_run_side_by_side() -> None:
    _, times = run(
        job(
            [step("gather", "a", "x", comm="0"), step("compute", "b", "y"), step("compute", "c", "y")],
            comms={"0": ((0,),)},
        )
    )
    assert times["compute b"] == (0, 1)
    assert times["compute c"] == (1, 2)


def test_an_event_holds_up_who_waits_for_it() -> None:
    _, times = run(job([step("compute", "a", "x", signals=0), step("compute", "b", "y", waits=(0,))]))
    assert times["compute a"] == (0, 1)
    assert times["compute b"] == (1, 2)


def test_a_send_and_its_receive_meet() -> None:
    sender = [
        step("compute", "a", "c", signals=0),
        step("send", "t", "send", waits=(0,), comm="0>1", nbytes=4),
    ]
    receiver = [
        step("recv", "t", "recv", comm="0>1", nbytes=4, signals=0),
        step("compute", "b", "c", waits=(0,)),
    ]
    found, times = run(job(sender, receiver, comms={"0>1": ((0, 1),)}), Timed(latency=0.5))
    assert times["send t"] == times["recv t"] == (1, 5.5)
    assert times["compute b"] == (5.5, 6.5)
    assert found.timelines[1].spans[0].waited == 1
    assert found.accounts[1].exposed == {"recv": 4.5}
    assert [(link.op, link.node, link.program, link.reason) for link in found.path] == [
        ("compute", "a", 0, "first"),
        ("recv", "t", 1, "peer"),
        ("compute", "b", 1, "event"),
    ]


def test_communications_of_one_device_on_one_level_share_its_link() -> None:
    both = [step("all_reduce", name, name, comm=name, nbytes=2) for name in ("a", "b")]
    found, times = run(job(both, both, comms={"a": ((0, 1),), "b": ((0, 1),)}))
    assert times["all_reduce a"] == times["all_reduce b"] == (0, 4)
    assert [account.contention for account in found.accounts] == [4, 4]


def test_the_rest_of_a_communication_is_fast_again_once_it_is_alone() -> None:
    both = [step("all_reduce", name, name, comm=name, nbytes=size) for name, size in (("a", 1), ("b", 3))]
    _, times = run(job(both, both, comms={"a": ((0, 1),), "b": ((0, 1),)}))
    assert times["all_reduce a"] == (0, 2)
    assert times["all_reduce b"] == (0, 4)


def test_a_send_and_a_receive_of_other_transfers_do_not_share() -> None:
    first = [step("send", "a", "send", comm="0>1", nbytes=2), step("recv", "b", "recv", comm="1>0", nbytes=2)]
    second = [
        step("recv", "a", "recv", comm="0>1", nbytes=2),
        step("send", "b", "send", comm="1>0", nbytes=2),
    ]
    _, times = run(job(first, second, comms={"0>1": ((0, 1),), "1>0": ((1, 0),)}))
    assert times["send a"] == times["send b"] == (0, 2)


def test_two_computations_of_one_device_share_it() -> None:
    _, times = run(job([step("compute", "a", "x"), step("compute", "b", "y")]))
    assert times["compute a"] == times["compute b"] == (0, 2)


def test_devices_share_the_cores_of_their_node() -> None:
    one = [step("compute", "a", "x")]
    assert run(job(one, one, one, one), Timed(cores=2))[0].step == 2
    assert run(job(one, one), Timed(cores=2))[0].step == 1
    assert run(job(one, one, one, one), Timed(cores=2, node=2))[0].step == 1


def test_processes_that_copy_take_their_core_from_computing() -> None:
    """Two devices compute for 1 s each, while a sum takes 1 s to begin and 1 s on the links."""
    one = [step("compute", "a", "c"), step("all_reduce", "r", "n", comm="g", nbytes=1)]
    plans = job(one, one, comms={"g": ((0, 1),)})
    assert run(plans, Timed(cores=2, latency=1.0))[0].step == 2
    assert run(plans, Timed(cores=2, latency=1.0, copying=1.0))[0].step == 3  # six seconds on two cores
    assert run(plans, Timed(cores=4, latency=1.0, copying=1.0))[0].step == 2
    assert run(plans, Timed(latency=1.0, copying=1.0))[0].step == 2  # devices that share no cores


def test_programs_that_never_meet_do_not_wait_for_each_other() -> None:
    slow = [step("compute", "a", "c"), step("all_reduce", "r", "c", comm="g", nbytes=1)]
    quick = [step("all_reduce", "r", "c", comm="g", nbytes=1)]
    found, _ = run(job(slow, slow, quick, quick, comms={"g": ((0, 1), (2, 3))}))
    assert [timeline.end for timeline in found.timelines] == [2, 2, 1, 1]


def test_memory_over_time() -> None:
    plan = Plan(
        devices=(0,),
        instrs=(
            step("compute", "a", "x", writes=slots("v"), workspace=5, signals=0),
            step("compute", "b", "x", reads=slots("v"), writes=slots("w"), frees=slots("v")),
            step("compute", "c", "x", reads=slots("w"), frees=slots("w")),
        ),
        slots={slot("v"): Slot(nbytes=10), slot("w"): Slot(nbytes=3)},
        residents={slot("p"): Slot(nbytes=100)},
    )
    found = simulate(Plans(plans=(plan,), comms={}, buckets={}, seed=1.0, weighted=False), None, Timed())
    memory = found.memories[0]
    assert memory.times == (0, 1, 2, 3)
    assert memory.live == (115, 113, 103, 100)
    assert (memory.peak, memory.peak_at) == (115, 0)
    assert memory.at_peak == (("p.out0", 100), ("v.out0", 10), ("workspace of a", 5))


def test_memory_that_only_grows_is_counted_in_linear_time() -> None:
    """Every instruction of a long warm-up is a new peak: what is live there is not copied each time."""
    values = [SlotId("output", f"v{number}") for number in range(40_000)]
    instrs = tuple(step("compute", "a", "x", writes=(value,)) for value in values)
    plan = Plan(devices=(0,), instrs=instrs, slots=dict.fromkeys(values, Slot(nbytes=1)), residents={})
    spans = [Span(start=float(number), end=float(number + 1)) for number in range(len(values))]
    begin = time.process_time()
    memory = memory_of(plan, Timeline(devices=(0,), spans=spans))
    assert time.process_time() - begin < 5  # 0.3 s; with copies 20 s
    assert memory.peak == len(memory.at_peak) == len(values)


@pytest.mark.parametrize("schedule", [schedules.one_f_one_b, schedules.zero_bubble, schedules.gpipe])
def test_a_device_that_takes_no_time_holds_what_the_plan_says(schedule: object) -> None:
    """In the order of issue the clock counts the very bytes that the plan's own count has."""
    plans, outline, _ = pipeline(schedule, 1, 4)  # type: ignore[arg-type]
    found = simulate(plans, outline, Unit(forward=0, inward=0, weight=0))
    assert [memory.peak for memory in found.memories] == [issue_order(plan).peak for plan in plans]


def test_the_critical_path_leads_from_the_first_instruction_to_the_last() -> None:
    plans, outline, _ = pipeline(schedules.one_f_one_b, 4, 8)
    found = simulate(plans, outline, Unit())
    assert found.path[0].reason == "first"
    assert found.path[-1].end == found.step
    for before, after in zip(found.path, found.path[1:], strict=False):
        assert before.end == after.start
    assert sum(link.end - link.start for link in found.path) == found.step


def test_a_roofline_takes_the_longer_of_arithmetic_and_traffic() -> None:
    outline = chain(1)
    chunk = outline.chunks[0]
    cluster = load_cluster("h100")
    seconds = Roofline(cluster).compute(chunk, "F")
    assert type_of(chunk) == "float32"
    assert seconds == pytest.approx(cluster.launch + cluster.kernel + 1e12 / 67e12 / cluster.attained)


def test_communication_slows_a_step_down_only_where_it_is_exposed() -> None:
    plans, outline, _ = pipeline(schedules.one_f_one_b, 4, 8, width=4096)
    quick = simulate(plans, outline, Roofline(load_cluster("h100")))
    slow = simulate(plans, outline, Roofline(load_cluster("a100")))
    assert slow.step > quick.step
    for account in quick.accounts:
        assert account.busy + account.bubble == pytest.approx(quick.step)
        assert sum(account.exposed.values()) <= account.bubble + 1e-12


def test_replicas_reduce_once_and_the_plan_is_simulated_once_for_all() -> None:
    strategy: list[Directive] = [replicate(at(PP=s), range(4 * s, 4 * s + 4)) for s in range(2)]
    strategy += [split(at(), parts=4), *schedules.one_f_one_b(2, 4)]
    outline = chain(2)
    plans, _ = lower(apply(start(outline), strategy))
    found = simulate(plans, outline, Roofline(load_cluster("h100")))
    assert [timeline.devices for timeline in found.timelines] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert all("all_reduce" in account.communication for account in found.accounts)


def test_every_kind_of_communication_is_simulated() -> None:
    outline = chain(2, experts=4)
    strategy: list[Directive] = [replicate(at(PP=s), range(4 * s, 4 * s + 4), zero=3) for s in range(2)]
    strategy += [shard(at(PP=s, EP="*"), range(4 * s, 4 * s + 4), ways=2) for s in range(2)]
    strategy += [split(at(), parts=2)]
    plans, _ = lower(apply(start(outline), strategy))
    found = simulate(plans, outline, Roofline(load_cluster("h100")))
    kinds = {ins.op for plan in plans for ins in plan.instrs if ins.op in COMMUNICATION}
    assert kinds >= {"counts", "exchange", "gather", "reduce_scatter", "send", "recv", "total"}
    assert found.step > 0


def test_one_device() -> None:
    outline = chain(1)
    plans, _ = lower(apply(start(outline), [place(at(), [0])]))
    found = simulate(plans, outline, Unit())
    assert (found.step, found.bubble) == (3, 0)
