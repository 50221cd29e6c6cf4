"""The clock: discrete events over streams, links and cores.

An instruction starts when the previous one of its stream has ended and its events are signalled. A
communication starts when that holds on all its members. Instructions that run at the same time share a device
evenly, and communications share one direction of one level of its links.
"""

import heapq
from collections.abc import Sequence

from piper.plan.ops import OPS
from piper.simulate.costs import Costs, Talk
from piper.simulate.dependencies import DependencyGraph, InstructionCosts

NO_INSTRUCTION = -1
HOST = -1  # the level of the link between a device and its host
ROUNDING = 1e-9  # fractional loads do not add up exactly
Uses = Sequence[tuple["Resource", float]]  # each with the load that the task puts on it


class Resource:
    """A device, link or set of cores that tasks share: at most `capacity` of load runs at full speed."""

    __slots__ = ("capacity", "load", "slowed", "tasks")

    def __init__(self, capacity: float) -> None:
        self.capacity, self.load = capacity, 0.0
        self.tasks: dict[Task, float] = {}
        self.slowed: dict[Task, float] = {}  # by communications under way: the part of its speed they take

    @property
    def rate(self) -> float:
        """Return the speed of each task that uses it, 1 if they do not slow each other down."""
        alone = 1 - max(self.slowed.values()) if self.slowed else 1.0
        return alone * self.capacity / self.load if self.full else alone

    @property
    def full(self) -> bool:
        """Return whether the tasks that use it slow each other down."""
        return self.load > self.capacity + ROUNDING


class Task:
    """An instruction that is running, or the instructions of one communication."""

    __slots__ = ("left", "members", "rate", "since", "slows", "uses", "version")

    def __init__(self, members: Sequence[int], seconds: float, uses: Uses, slows: Uses = ()) -> None:
        self.members, self.left, self.uses = members, seconds, uses
        self.slows = slows  # devices that compute more slowly meanwhile
        self.rate, self.since, self.version = 0.0, 0.0, 0


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
        self.loads = loads_of(graph, costs.node)

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
        task = Task(
            members,
            seconds,
            self._lanes(members, talk) if seconds else (),
            self._slowed(members, talk.slows) if seconds and talk.slows else (),
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

    def _slowed(self, members: Sequence[int], slows: float) -> list[tuple[Resource, float]]:
        """Return the devices of a communication, each once, with the part of their speed that it takes."""
        programs = dict.fromkeys(self.graph.program[member] for member in members)
        return [(self.devices[program], slows) for program in programs]

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
                crowded.update(dict.fromkeys(resource.tasks))
            resource.tasks[task] = load
        for resource, part in task.slows:
            resource.slowed[task] = part
            crowded.update(dict.fromkeys(resource.tasks))
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
                relieved.update(dict.fromkeys(resource.tasks))
        for resource, _ in task.slows:
            del resource.slowed[task]
            relieved.update(dict.fromkeys(resource.tasks))
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


def loads_of(graph: DependencyGraph, node: int) -> list[float]:
    """Return how many devices of each program a node has on average."""
    nodes = -(-len(graph.plans.devices) // node)
    return [len(plan.devices) / nodes for plan in graph.plans]
