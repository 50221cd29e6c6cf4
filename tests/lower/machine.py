"""Runs plans in a random order that streams, events and communicators allow, on the symbols of the proof.

The proof runs every program in its issue order, and argues that this one order speaks for all. Here streams get
ahead of each other, a send ends before or with its receive, and every value must be right all the same.
"""

import random

from piper.ir.graph import Graph
from piper.ir.ids import SlotId
from piper.plan.instr import Instr
from piper.plan.plan import Comm, Plan, Plans
from piper.proof.specification import Specification
from piper.proof.symbolic_state import ProgramInstr
from piper.proof.symbolic_values import Value
from piper.proof.tables import shard_problems, table_problems
from piper.proof.values import SymbolicRun
from tests.lower.lifetimes import check_lifetimes, check_passes, check_reruns


def examine(plans: Plans, graph: Graph, *seeds: int, clip: bool = False) -> None:
    """Assert that plans compute what the graph means, in some of many orders that they allow."""
    spec = Specification(graph, clip=clip)
    wrong = [*table_problems(plans, spec), *shard_problems(plans, whole=False)]
    assert not wrong, wrong[0]
    for seed in seeds or (0,):
        run = RandomRun(plans, spec, seed)
        run.run()
        assert not run.state.problems, run.state.problems[0]
    check_lifetimes(plans)
    check_passes(plans, graph)
    check_reruns(plans, graph.chosen(lambda options: options.rerun))


class Streams:
    """The streams of a program: the places of their instructions, how far each has come, and its events."""

    def __init__(self, program: int, plan: Plan, slots: dict[SlotId, Value]) -> None:
        self.program, self.instrs, self.slots = program, plan.instrs, slots
        self.places: dict[str, list[int]] = {}
        for place, ins in enumerate(plan.instrs):
            self.places.setdefault(ins.stream, []).append(place)
        self.reached = dict.fromkeys(self.places, 0)
        self.counts = [place for place, ins in enumerate(plan.instrs) if ins.op == "counts"]
        self.events: set[int] = set()

    def at(self, place: int) -> ProgramInstr:
        return ProgramInstr(program=self.program, place=place, ins=self.instrs[place], slots=self.slots)

    def head(self, stream: str) -> ProgramInstr | None:
        """The next instruction of a stream, once its events have come and the host has issued it."""
        if self.reached[stream] == len(self.places[stream]):
            return None
        place = self.places[stream][self.reached[stream]]
        if self.counts and self.counts[0] < place:  # the host waits for the counts of rows
            return None
        return self.at(place) if self.events.issuperset(self.instrs[place].waits) else None

    def finish(self, ins: Instr) -> None:
        """End the instruction at the head of its stream."""
        if ins.signals is not None:
            self.events.add(ins.signals)
        if ins.op == "counts":
            self.counts.remove(self.places[ins.stream][self.reached[ins.stream]])
        self.reached[ins.stream] += 1


class RandomRun(SymbolicRun):
    """Runs all programs together, each stream on its own."""

    def __init__(self, plans: Plans, spec: Specification, seed: int) -> None:
        super().__init__(plans, spec)
        self.rng = random.Random(seed)
        self.buffered = self.rng.random() < 0.5  # whether a send may end before its receive begins
        self.streams = [
            Streams(program, plan, self.state.slots[program]) for program, plan in enumerate(plans)
        ]
        # By communicator and node: what programs have sent, and who has come to a collective.
        self.sent: dict[tuple[str, str], dict[int, Value | None]] = {}
        self.arrived: dict[tuple[str, str], dict[int, ProgramInstr]] = {}

    def run(self) -> None:
        """Run everything; nothing may be stuck, and nothing left but what outlives the step."""
        moved = True
        while moved and not self.state.problems:
            moved = False
            heads = [(program, stream) for program, one in enumerate(self.streams) for stream in one.places]
            self.rng.shuffle(heads)
            most = self.rng.randint(1, 6)  # so that one stream may get far ahead of another
            for program, stream in heads:
                for _ in range(most):
                    at = self.streams[program].head(stream)
                    if at is None or not self.advance(at):
                        break
                    moved = True
        for streams in self.streams:
            for stream, places in streams.places.items():
                if not self.state.problems and streams.reached[stream] < len(places):
                    self.state.complain(streams.at(places[streams.reached[stream]]), "is stuck")
        for program, plan in enumerate(self.plans) if not self.state.problems else ():
            left = self.state.slots[program].keys() - plan.residents.keys()
            assert not left, f"device {plan.devices[0]} keeps {left}"
            self.check_end(program)

    def finish(self, at: ProgramInstr) -> None:
        """End an instruction: what it frees, and its event."""
        super().finish(at)
        self.streams[at.program].finish(at.ins)

    def advance(self, at: ProgramInstr) -> bool:
        """Run the head of a stream. Return whether it could run: the last member runs a collective for all."""
        if at.ins.comm is None:
            self.step([at])
            return True
        comm, key = self.plans.comms[at.ins.comm], (at.ins.comm, at.ins.node)
        if at.ins.op == "send":
            if not self.buffered and not self.are_receiving(at, comm):
                return False
            self.sent.setdefault(key, {})[at.program] = self.local.sent(at)
            self.finish(at)
        elif at.ins.op == "recv":
            senders, sent = self.state.covers.sending_programs(comm.name, at.program), self.sent.get(key, {})
            if not sent.keys() >= set(senders):
                return False
            self.collective.receive(at, comm, {sender: sent[sender] for sender in senders})
            self.finish(at)
        else:
            there = self.arrived.setdefault(key, {})
            there[at.program] = at
            if there.keys() != self.members(comm.name):
                return False
            self.step([there[program] for program in sorted(there)])
        return True

    def are_receiving(self, at: ProgramInstr, comm: Comm) -> bool:
        """Whether all that a program sends to wait for it."""
        where = self.state.covers.where
        receivers = {where[group[1]][0] for group in comm.groups if where[group[0]][0] == at.program}
        return all(self.waits(other, at.ins) for other in receivers)

    def waits(self, program: int, send: Instr) -> bool:
        """Whether the head of some stream receives what is sent."""
        streams = self.streams[program]
        heads = [at.ins for stream in streams.places if (at := streams.head(stream)) is not None]
        return any((ins.op, ins.node, ins.comm) == ("recv", send.node, send.comm) for ins in heads)
