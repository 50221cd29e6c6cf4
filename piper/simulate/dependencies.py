"""The dependency graph of the instructions of all programs, by number, with their communications.

Each program is simulated once, for all its devices. A communication is one event of all programs that take
part in it: a send with its receive, a collective with all members of its groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from piper.ir.chunk import Chunk, Phase
from piper.ir.devices import Devices
from piper.plan.instr import Instr
from piper.plan.ops import COMMUNICATION, OPS
from piper.plan.plan import Comm, Plan, Plans
from piper.simulate.costs import Costs, Talk


@dataclass(slots=True, kw_only=True)
class DependencyGraph:
    """The dependency graph. Instruction `first[p] + i` is the i-th of program p."""

    plans: Plans
    instrs: list[Instr]
    program: list[int]
    first: list[int]
    followers: list[tuple[int, ...]]  # the next instruction of its stream, and those that wait for its event
    waiting: list[int]  # how many instructions it waits for
    meeting: list[int]  # the communication that it is part of; -1: none
    meetings: list[list[int]] = field(default_factory=list)

    def place(self, number: int) -> int:
        """Return the place of an instruction in its plan."""
        return number - self.first[self.program[number]]


def weave(plans: Plans, together: Sequence[Sequence[str]] = ()) -> DependencyGraph:
    """Number every instruction and link it to those that wait for it. together: as in `simulate`."""
    graph = DependencyGraph(
        plans=plans, instrs=[], program=[], first=[], followers=[], waiting=[], meeting=[]
    )
    group = {node: number for number, nodes in enumerate(together) for node in nodes}
    for number, plan in enumerate(plans):
        weave_plan(graph, number, plan, group)
    met: dict[tuple[str, str, int], int] = {}
    program = {device: number for number, plan in enumerate(plans) for device in plan.devices}
    teams = {name: teams_of(program, comm) for name, comm in plans.comms.items()}
    graph.meeting = [-1] * len(graph.instrs)
    for number, ins in enumerate(graph.instrs):
        if ins.comm is not None and ins.op in COMMUNICATION:
            key = (ins.node, ins.comm, teams[ins.comm][graph.program[number]])
            if key not in met:
                met[key] = len(graph.meetings)
                graph.meetings.append([])
            graph.meeting[number] = met[key]
            graph.meetings[met[key]].append(number)
    return graph


def weave_plan(graph: DependencyGraph, number: int, plan: Plan, group: Mapping[str, int]) -> None:
    """Number the instructions of one program."""
    first = len(graph.instrs)
    graph.first.append(first)
    followers: list[list[int]] = [[] for _ in plan.instrs]
    last: dict[str, int] = {}  # by stream
    signalled: dict[int, int] = {}  # by event
    leader: dict[int, int] = {}  # by group: its first instruction
    for place, ins in enumerate(plan.instrs):
        before = [signalled[event] for event in ins.waits]
        lead = leader.setdefault(group[ins.node], place) if ins.node in group else place
        for earlier in before if lead < place else ():
            followers[earlier].append(first + lead)
            graph.waiting[first + lead] += 1
        if ins.stream in last:
            before.append(last[ins.stream])
        for earlier in before:
            followers[earlier].append(first + place)
        graph.waiting.append(len(before))
        last[ins.stream] = place
        if ins.signals is not None:
            signalled[ins.signals] = place
    graph.instrs += plan.instrs
    graph.program += [number] * len(plan.instrs)
    graph.followers += [tuple(after) for after in followers]


def teams_of(program: Mapping[int, int], comm: Comm) -> dict[int, int]:
    """Return the team of each program: programs that a communicator's groups connect are one team.

    Devices that have no program here never keep the others waiting.
    """
    team: dict[int, int] = {}
    known = ({program[device] for device in group if device in program} for group in comm.groups)
    for members in {tuple(sorted(group)) for group in known if group}:
        joined = {team.setdefault(number, number) for number in members}
        if len(joined) > 1:
            for number, old in team.items():
                if old in joined:
                    team[number] = min(joined)
    return team


class InstructionCosts:
    """The cost of each instruction, computed once for equal instructions."""

    def __init__(self, graph: DependencyGraph, chunks: Mapping[str, Chunk], costs: Costs) -> None:
        self.graph, self.chunks, self.costs = graph, chunks, costs
        self.computes: dict[tuple[Phase, str], float] = {}
        self.talks: dict[tuple[str, str, int, int], Talk] = {}
        self.slowest: dict[tuple[str, str], Devices] = {}  # by op and communicator

    def seconds(self, number: int) -> float:
        """Return the seconds of an instruction that does not communicate."""
        ins = self.graph.instrs[number]
        plan = self.graph.plans.plans[self.graph.program[number]]
        if ins.op != "compute":
            return self.costs.touch(ins.op, touched(plan, ins))
        key = (ins.computes.phase, ins.computes.chunk)
        if key not in self.computes:
            self.computes[key] = self.costs.compute(self.chunks.get(key[1]), key[0])
        if not ins.adds_to:
            return self.computes[key]
        # It writes its gradients in any case. Where it adds them to a sum, it reads that as well.
        read = sum(plan.slots[slot].nbytes for slot in ins.adds_to)
        return self.computes[key] + self.costs.touch("compute", read)

    def talk(self, number: int) -> Talk:
        """Return the cost of a communication in the slowest of its groups."""
        ins = self.graph.instrs[number]
        assert ins.comm is not None
        apart = 0  # bytes of a backward's gradients that it reads, before any sum of them
        if ins.op == "reduce_scatter":
            slots = self.graph.plans.plans[self.graph.program[number]].slots
            apart = sum(slots[name].nbytes for name in ins.reads if name.kind == "gradient")
        key = (ins.travels_as, ins.comm, ins.nbytes, apart)
        if key not in self.talks:
            talk = self.costs.talk(ins.travels_as, ins.nbytes, self._slowest(ins, ins.comm))
            if talk.copies and apart:
                talk = replace(talk, latency=talk.latency + self.costs.touch("accumulate", 2 * apart))
            self.talks[key] = talk
        return self.talks[key]

    def _slowest(self, ins: Instr, comm: str) -> Devices:
        """Return the group in which a communication takes longest: the others end up waiting for it."""
        key = (ins.travels_as, comm)
        if key not in self.slowest:
            first: dict[tuple[int, ...], Devices] = {}  # of all groups that lie alike in the network
            for group in self.graph.plans.comms[comm].groups:
                lowest = group[0] - group[0] % self.costs.period
                first.setdefault(tuple(device - lowest for device in group), group)
            talks = [(self.costs.talk(ins.travels_as, ins.nbytes, group), group) for group in first.values()]
            _, self.slowest[key] = max(talks, key=lambda entry: entry[0].latency + entry[0].seconds)
        return self.slowest[key]


def touched(plan: Plan, ins: Instr) -> int:
    """Return the bytes that an instruction reads and writes, an update those of its state too."""
    if OPS[ins.op].host:
        return ins.nbytes  # that it moves between device and host
    total = 0
    for name in (*ins.reads, *ins.writes):
        slot = plan.slots.get(name) or plan.residents.get(name)
        if slot is not None:
            total += slot.nbytes + sum(nbytes for _, nbytes in slot.shares)
    if ins.op == "update":
        owners = {name.owner for name in ins.writes}
        states = (
            s.nbytes for name, s in plan.residents.items() if name.kind == "state" and name.owner in owners
        )
        total += 2 * sum(states)
    return total
