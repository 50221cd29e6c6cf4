"""The clock: discrete events over streams, links and cores, and the dependencies between instructions.

Each program is simulated once, for all its devices. A communication is one event of all programs that take
part in it: a send with its receive, a collective with all members of its groups. An instruction starts when
the previous one of its stream has ended and its events are signalled, a communication when that holds on all
its members. Instructions that run at the same time share a device evenly, and communications share one
direction of one level of its links.
"""

import heapq
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
    instrs: list[Instr] = field(default_factory=list)
    program: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    followers: list[tuple[int, ...]] = field(default_factory=list)
    # ^ the next instruction of its stream, and those that wait for its event
    waiting: list[int] = field(default_factory=list)  # how many instructions it waits for
    meeting: list[int] = field(default_factory=list)  # the communication that it is part of; -1: none
    meetings: list[list[int]] = field(default_factory=list)


def weave(plans: Plans, together: Sequence[Sequence[str]] = ()) -> DependencyGraph:
    """Number every instruction and link it to those that wait for it. together: as in `simulate`."""
    graph = DependencyGraph(plans=plans)
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
    signalled = plan.signallers
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


NO_INSTRUCTION = -1
HOST = -1  # the level of the link between a device and its host
ROUNDING = 1e-9  # fractional loads do not add up exactly
Uses = Sequence[tuple["Resource", float]]  # each with the load that the task puts on it


@dataclass(slots=True, eq=False)
class Resource:
    """A device, link or set of cores that tasks share: at most `capacity` of load runs at full speed."""

    capacity: float
    load: float = 0.0
    tasks: "dict[Task, None]" = field(default_factory=dict)
    slowed: "dict[Task, float]" = field(default_factory=dict)
    # ^ by communications under way: the part of its speed they take

    @property
    def rate(self) -> float:
        """Return the speed of each task that uses it, 1 if they do not slow each other down."""
        alone = 1 - max(self.slowed.values()) if self.slowed else 1.0
        return alone * self.capacity / self.load if self.full else alone

    @property
    def full(self) -> bool:
        """Return whether the tasks that use it slow each other down."""
        return self.load > self.capacity + ROUNDING


@dataclass(slots=True, eq=False)
class Task:
    """An instruction that is running, or the instructions of one communication."""

    members: Sequence[int]
    left: float  # seconds
    uses: Uses
    slows: Uses = ()  # devices that compute more slowly meanwhile
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


class Engine:
    """Runs the instructions of a dependency graph once, on a simulated clock."""

    def __init__(self, graph: DependencyGraph, prices: InstructionCosts, costs: Costs) -> None:
        self.graph, self.prices = graph, prices
        count = len(graph.instrs)
        self.ready, self.start, self.end = [0.0] * count, [0.0] * count, [0.0] * count
        self.cause = [NO_INSTRUCTION] * count  # the instruction of its device whose end let it start
        self.nominal = [0.0] * len(graph.meetings)  # what each communication takes alone
        self.late = [NO_INSTRUCTION] * len(graph.meetings)  # the member that was ready last
        self.missing = [len(members) for members in graph.meetings]
        self.waiting = list(graph.waiting)
        self.events: list[tuple[float, int, Task, int]] = []
        self.over: list[Task] = []
        self.now, self.ticks = 0.0, 0
        self.wake = costs.wake
        self.links: dict[tuple[int, int, str], Resource] = {}
        self.devices = [Resource(1) for _ in graph.plans]
        self.cores = Resource(costs.cores) if costs.cores else None
        nodes = -(-len(graph.plans.devices) // costs.node)
        self.loads = [len(plan.devices) / nodes for plan in graph.plans]  # devices that a node has on average

    def run(self) -> None:
        """Run to the end. Every instruction has its times afterwards."""
        for number, count in enumerate(self.graph.waiting):
            if not count:
                self._ready(number)
        while True:
            while self.over:
                self._finish(self.over.pop())
            if not self.events:
                break
            time, _, task, version = heapq.heappop(self.events)
            if version != task.version:
                continue  # its speed has changed since
            self.now = time
            if task.rate:
                self._leave(task)
                self._finish(task)
            else:
                self._join(task)  # its latency is over
        assert not any(self.missing), "plans that are proven never wait for ever"

    def _ready(self, number: int) -> None:
        self.ready[number] = self.now
        meeting = self.graph.meeting[number]
        if meeting < 0:
            self._begin_alone(number)
            return
        self.missing[meeting] -= 1
        if not self.missing[meeting]:
            self.late[meeting] = number
            self._begin_talk(meeting, number)

    def _begin_alone(self, number: int) -> None:
        wake = self._wake(number)
        self.start[number] = self.now + wake
        seconds = self.prices.seconds(number)
        if not seconds and not wake:
            self.over.append(Task((number,), 0.0, ()))
            return
        program, operation = self.graph.program[number], OPS[self.graph.instrs[number].op]
        uses: list[tuple[Resource, float]] = []
        if self.cores is not None:
            uses.append((self.cores, self.loads[program]))
        elif operation.takes == "device":
            uses.append((self.devices[program], 1.0))
        elif operation.host:
            way = "out" if operation.outward else "in"
            uses.append((self._link(program, HOST, way), 1.0))
        task = Task((number,), seconds, uses)
        if wake:
            self._expect(task, self.now + wake)
        else:
            self._join(task)

    def _wake(self, number: int) -> float:
        """Return the delay of an instruction that waited for another stream; 0 if it did not."""
        cause = self.cause[number]
        if not self.wake or cause == NO_INSTRUCTION:
            return 0.0
        return self.wake if self.graph.instrs[cause].stream != self.graph.instrs[number].stream else 0.0

    def _begin_talk(self, meeting: int, number: int) -> None:
        members = self.graph.meetings[meeting]
        wake = self._wake(number)
        for member in members:
            self.start[member] = self.now + wake
        talk = self.prices.talk(number)
        self.nominal[meeting] = talk.latency + talk.seconds
        # Processes that copy are at work from the beginning: system calls and threads that wake up are most
        # of a short communication.
        latency = 0.0 if talk.cores and self.cores is not None else talk.latency
        seconds = talk.seconds + talk.latency - latency
        slowed = {self.graph.program[m]: None for m in members} if seconds and talk.slows else {}
        task = Task(
            members,
            seconds,
            self._lanes(members, talk) if seconds else (),
            [(self.devices[program], talk.slows) for program in slowed],
        )
        if latency + wake:
            self._expect(task, self.now + wake + latency)
        elif seconds:
            self._join(task)
        else:
            self.over.append(task)

    def _lanes(self, members: Sequence[int], talk: Talk) -> list[tuple[Resource, float]]:
        """Return what a communication uses: its members' links, and their cores where those copy."""
        uses: list[tuple[Resource, float]] = []
        for member in members:
            operation, program = OPS[self.graph.instrs[member].op], self.graph.program[member]
            for way, used in (("out", operation.sends), ("in", operation.receives)):
                if used:
                    uses.append((self._link(program, talk.level, way), 1.0))
            if self.cores is not None:
                uses.append((self.cores, self.loads[program] * (talk.cores or 1.0)))
        return uses

    def _link(self, program: int, level: int, way: str) -> Resource:
        """Return one direction of a device's link at a level of the network, or to its host."""
        return self.links.setdefault((program, level, way), Resource(1))

    def _expect(self, task: Task, time: float) -> None:
        self.ticks += 1
        task.version += 1
        heapq.heappush(self.events, (time, self.ticks, task, task.version))

    def _join(self, task: Task) -> None:
        task.since = self.now
        crowded: dict[Task, None] = {}
        for resource, load in task.uses:
            resource.load += load
            if resource.full and resource.tasks:
                crowded.update(resource.tasks)
            resource.tasks[task] = None
        for resource, part in task.slows:
            resource.slowed[task] = part
            crowded.update(resource.tasks)
        task.rate = min((resource.rate for resource, _ in task.uses), default=1.0)
        self._expect(task, self.now + task.left / task.rate)
        self._change(crowded)

    def _leave(self, task: Task) -> None:
        relieved: dict[Task, None] = {}
        for resource, load in task.uses:
            full = resource.full
            resource.load -= load
            resource.tasks.pop(task, None)
            if full and resource.tasks:
                relieved.update(resource.tasks)
        for resource, _ in task.slows:
            del resource.slowed[task]
            relieved.update(resource.tasks)
        relieved.pop(task, None)
        self._change(relieved)

    def _change(self, tasks: dict[Task, None]) -> None:
        """Update the speed of tasks, and the time at which each ends."""
        for task in tasks:
            rate = min(resource.rate for resource, _ in task.uses)
            if rate != task.rate:
                task.left -= (self.now - task.since) * task.rate
                task.since, task.rate = self.now, rate
                self._expect(task, self.now + max(0.0, task.left) / rate)

    def _finish(self, task: Task) -> None:
        for member in task.members:
            self.end[member] = self.now
        for member in task.members:
            for follower in self.graph.followers[member]:
                self.waiting[follower] -= 1
                if not self.waiting[follower]:
                    self.cause[follower] = member
                    self._ready(follower)
