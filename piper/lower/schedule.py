"""One global order for everything in the step, by list scheduling over a rough cost.

Every device later issues its part of the nodes in this order. Because it is one order, with which data and
`order` directives agree, communicators can never wait for each other in a cycle.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from piper.errors import ScheduleError
from piper.ir.chunk import Chunk
from piper.ir.grouping import grouped
from piper.ir.ids import SlotId
from piper.ir.node import COMPUTE_STREAM, Compute, Node, Transfer
from piper.lower.state import LoweringState
from piper.plan.plan import Slot
from piper.plan.prove import in_order, number_before, shortest_circle

SHOWN = 6  # nodes of a cycle that an error names at each end
URGENCY = {"B": 1, "BI": 1, "F": 2, "BW": 3}  # communication first, then what frees memory, then the rest
FLOPS = 2e14  # a current accelerator's, about
MEMORY = 2e12  # bytes per second
LINK = 5e10
LATENCY = 5e-6


Priority = tuple[int, tuple[int, ...], float, int]
# ^ the lowest goes first: by urgency, then earlier microbatches, then the longest remaining path, then number


@dataclass(slots=True)
class PrecedenceGraph:
    """The dependency graph: nodes by number, with the nodes that wait for each."""

    nodes: tuple[Node, ...]
    followers: list[list[int]]
    asked_by: dict[tuple[int, int], int]  # temporal edges: the directive that asked


def schedule(state: LoweringState) -> LoweringState:
    """Put every node of the step in one order: ready nodes first, ties by urgency and path length.

    F[PP=0 MB=0]  F[PP=0 MB=1]  transfer  F[PP=1 MB=0] ...
    """
    graph = connect(state)
    order, stuck = in_order(graph.followers)
    if stuck:
        raise cycle_error(graph, stuck, state)
    chunks = state.graph.chunks
    costs = [cost_of(node, chunks, state.values) for node in graph.nodes]
    tails = [0.0] * len(order)  # of each node: the longest path from its start to the end of the step
    for i in reversed(order):
        tails[i] = costs[i] + max((tails[j] for j in graph.followers[i]), default=0.0)
    priority = [priority_of(node, tails[i], i) for i, node in enumerate(graph.nodes)]
    sequence = received_as_read(graph, simulate(graph, costs, priority))
    return replace(state, sequence=tuple(graph.nodes[i] for i in sequence))


def sequence_respects_every_edge(state: LoweringState) -> Iterator[str]:
    """Yield each node that comes before a value it reads, or before a node ordered before it."""
    place = {node.name: i for i, node in enumerate(state.sequence)}
    if len(place) != len(state.nodes):
        yield f"{len(state.nodes)} nodes, {len(place)} in line"
    written = {value: i for i, node in enumerate(state.sequence) for value in node.writes}
    for i, node in enumerate(state.sequence):
        for value in node.reads:
            if written.get(value, -1) >= i and value not in state.residents:
                yield f"{node.name} stands before {value} is written"
    for first, then, _ in state.temporal:
        if place[first] >= place[then]:
            yield f"{first} stands after {then}"


def connect(state: LoweringState) -> PrecedenceGraph:
    """Number the nodes and link each to those that must wait for it."""
    producer: dict[SlotId, int] = {}
    number: dict[str, int] = {}
    for i, node in enumerate(state.nodes):
        number[node.name] = i
        for value in node.writes:
            if value not in state.residents:
                producer[value] = i
    followers: list[list[int]] = [[] for _ in state.nodes]
    for i, node in enumerate(state.nodes):
        for before in {producer[value] for value in node.reads if value in producer}:
            followers[before].append(i)
    asked_by: dict[tuple[int, int], int] = {}
    for first, then, by in state.temporal:
        pair = (number[first], number[then])
        if pair not in asked_by:
            asked_by[pair] = by
            followers[pair[0]].append(pair[1])
    return PrecedenceGraph(state.nodes, followers, asked_by)


def cycle_error(graph: PrecedenceGraph, stuck: set[int], state: LoweringState) -> ScheduleError:
    """Return the error for a short cycle that an order closes, with the path that contradicts it."""
    best = shortest_circle(graph.followers, stuck)
    # The order of the latest directive closes the cycle.
    latest = max(range(len(best)), key=lambda i: graph.asked_by.get((best[i - 1], best[i]), -1))
    best = best[latest:] + best[:latest]
    then, first = best[0], best[-1]
    arrows = [graph.nodes[then].name]
    for a, b in pairwise(best):
        arrows.append(f"{'..>' if (a, b) in graph.asked_by else '-->'} {graph.nodes[b].name}")
    if (more := len(arrows) - 2 * SHOWN) > 0:
        arrows[SHOWN:-SHOWN] = [f"--> ... {more} more ..."]
    others = sorted({graph.asked_by[pair] for pair in pairwise(best) if pair in graph.asked_by})
    by = graph.asked_by[first, then]
    directives = state.graph.directives
    facts = {"asked": f"{graph.nodes[first].name} before {graph.nodes[then].name}", "but": " ".join(arrows)}
    if extra := [directives[o].title for o in others if o not in (by, -1)]:
        facts["with"] = ", ".join(extra)
    return ScheduleError(
        "this order can never run",
        by=directives[by].title,
        facts=facts,
        hint=f"put {graph.nodes[then].name} first, or order only one of them",
    )


def priority_of(node: Node, tail: float, i: int) -> Priority:
    """Return the priority of a node. tail: the longest path from its start to the end of the step."""
    if isinstance(node, Compute):
        return URGENCY[node.phase], tuple([index for _, index in node.part]), -tail, i
    return 0, (), -tail, i


def simulate(graph: PrecedenceGraph, costs: list[float], priority: list[Priority]) -> list[int]:
    """Return the nodes in the order they start if each stream always takes its most urgent ready node."""
    resources: dict[tuple[int, str], int] = {}
    occupied = [  # by each node: a stream of its first device
        (n.source[0], f"{n.stream}.send") if isinstance(n, Transfer) else (n.devices[0], n.stream)
        for n in graph.nodes
    ]
    resource = [resources.setdefault(stream, len(resources)) for stream in occupied]
    turn = [(stream == COMPUTE_STREAM, number) for (_, stream), number in resources.items()]  # sends go early
    ready: list[list[tuple[Priority, int]]] = [[] for _ in resources]
    busy = [False] * len(resources)
    waiting = number_before(graph.followers)
    events: list[tuple[float, int]] = []
    sequence: list[int] = []
    touched: set[int] = set()
    for i, count in enumerate(waiting):
        if not count:
            heapq.heappush(ready[resource[i]], (priority[i], i))
            touched.add(resource[i])
    now = 0.0
    while True:
        for at in sorted(touched, key=turn.__getitem__):
            if not busy[at] and ready[at]:
                _, i = heapq.heappop(ready[at])
                busy[at] = True
                sequence.append(i)
                heapq.heappush(events, (now + costs[i], i))
        if not events:
            return sequence
        now = events[0][0]
        touched.clear()
        while events and events[0][0] == now:
            _, i = heapq.heappop(events)
            busy[resource[i]] = False
            touched.add(resource[i])
            for j in graph.followers[i]:
                waiting[j] -= 1
                if not waiting[j]:
                    heapq.heappush(ready[resource[j]], (priority[j], j))
                    touched.add(resource[j])


def received_as_read(graph: PrecedenceGraph, sequence: list[int]) -> list[int]:
    """Return the sequence with the transfers to each device in the order in which it reads them."""
    # A device receives one value after another. One that it reads later, from a peer that is slower than the
    # rough cost says, would hold up the one that it reads next. So a transfer waits for those to the same
    # device that are read before it; each still comes before its own reader.
    position = {i: place for place, i in enumerate(sequence)}
    receiver = {  # of each transfer: its first device there, and the stream that it takes
        i: (node.target[0], node.stream) for i, node in enumerate(graph.nodes) if isinstance(node, Transfer)
    }
    read_at = {i: min((position[j] for j in graph.followers[i]), default=len(sequence)) for i in receiver}
    late_first = sorted(receiver, key=lambda i: (-read_at[i], -position[i]))
    due = grouped((receiver[i], i) for i in late_first)  # by receiver: its transfers, the next one last
    issued: set[int] = set()
    result: list[int] = []
    for i in sequence:
        if i not in receiver:
            result.append(i)
            continue
        issued.add(i)
        waiting = due[receiver[i]]
        while waiting and waiting[-1] in issued:
            result.append(waiting.pop())
    return result


def cost_of(node: Node, chunks: Mapping[str, Chunk], values: Mapping[SlotId, Slot]) -> float:
    """Estimate roughly the seconds that a node takes, to choose between orders alone."""
    if isinstance(node, Compute):
        spec = chunks[node.chunk].phases[node.phase]
        return LATENCY + max(spec.flops / FLOPS, spec.bytes_moved / MEMORY)
    if node.op in ("transfer", "exchange", "collect", "slice"):
        return LATENCY + values[node.writes[0].base].nbytes / LINK
    return LATENCY
