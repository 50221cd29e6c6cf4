"""The text form of a graph: its directives, chunks, nodes and orders, parsed back to the very same graph.

What a chunk computes is the outline's, so reading a graph takes the outline it was made of.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import cast

from piper.errors import ConfigError
from piper.ir.chunk import PHASES, CapturedModel, Phase, Tags
from piper.ir.devices import parse, show
from piper.ir.graph import AppliedDirective, AxisPolicy, ChunkRun, Graph, GroupMember, Index, Ordering, Policy
from piper.ir.mesh import EXPERTS
from piper.ir.node import Compute
from piper.ir.sharding import AxisPlacement, Shard
from piper.ir.text_fields import (
    AND,
    GAP,
    BadLineError,
    Readers,
    build,
    each_line,
    flag,
    line,
    name,
    numbers,
    pairs,
    read_fields,
    show_pairs,
    shown,
)

STEP = re.compile(r"(F|B|BI|BW)\[([^\[\]]*)\](?:\[([^\[\]]*)\])?")
NODE: Readers = {"part": pairs, "devices": parse, "stream": str, "origin": numbers}
CHUNK: Readers = {
    "parts": pairs,
    "transfers": str,
    "budget": float,
    "again": str,
    "precision": str,
    "gather": str,
    "zero": int,
    "bucket_mb": float,
    "reduce": str,
    "reduce_stream": str,
    "gather_stream": str,
    "ways": int,
    "exchange_stream": str,
    "origin": int,
    "by_expert": lambda text: dict(read_sharding(each) for each in text.split(AND)),
    "axes": lambda text: tuple(map(read_axis, text.split(AND))),
}
ASKED: Readers = {"verb": str, "places": flag}
POLICY = tuple(field.name for field in fields(Policy) if field.name not in ("by_expert", "axes"))


def show_graph(graph: Graph) -> str:
    """Write a graph down."""
    return "\n".join(lines_of(graph)) + "\n"


def lines_of(graph: Graph) -> Iterator[str]:
    """The lines of the text form."""
    for asked in graph.directives:
        yield line("directive", shown(asked.title), [f"verb={asked.verb}", f"places={int(asked.places)}"])
    for chunk in graph.outline.chunks:
        said = [f"parts={show_pairs(graph.parts[chunk.name])}"] if graph.parts[chunk.name] else []
        if chunk.name in graph.transfer_streams:
            said.append(f"transfers={graph.transfer_streams[chunk.name]}")
        asked_of = {"budget": graph.budgets, "again": graph.reruns, "precision": graph.precisions}
        asked_of["gather"] = dict.fromkeys(graph.gathered_in_fp8, "fp8")
        said += [f"{key}={found[chunk.name]}" for key, found in asked_of.items() if chunk.name in found]
        if chunk.name in graph.policies:
            policy = graph.policies[chunk.name]
            said += [
                f"{name}={getattr(policy, name)}" for name in POLICY if getattr(policy, name) is not None
            ]
            said += [f"by_expert={show_shardings(policy.by_expert)}"] if policy.by_expert else []
            said += [f"axes={AND.join(map(show_axis, policy.axes))}"] if policy.axes else []
        yield line("chunk", shown(chunk.name), said)
    for node in graph.nodes.values():
        yield line("node", show_step(node.chunk, node.phase, node.part), node_fields(node))
    for ordering in graph.orderings:
        groups = AND.join(
            " ; ".join(show_step(s.chunk, s.phase, s.part) for s in group) for group in ordering.groups
        )
        yield line("order", str(ordering.by), [groups])


def node_fields(node: Compute) -> Iterator[str]:
    """What a node has beyond its name."""
    if node.devices:
        yield f"devices={show(node.devices)}"
    yield f"stream={node.stream}"
    if node.origin:
        yield f"origin={' '.join(map(str, node.origin))}"


def show_shardings(shardings: Mapping[str, AxisPlacement]) -> str:
    """Write how state is divided, name by name."""
    return AND.join(f"{shown(name)} {each.degree}" for name, each in shardings.items())


def read_sharding(text: str) -> tuple[str, AxisPlacement]:
    """Read one of what `show_shardings` wrote."""
    called, _, degree = text.rpartition(" ")
    return name(called), AxisPlacement(axis=EXPERTS, degree=int(degree), placement=Shard(dim=0))


def show_axis(held: AxisPolicy) -> str:
    """Write how a chunk is divided along one axis."""
    return f"{held.axis} {held.degree} {held.stream} {held.origin}"


def read_axis(text: str) -> AxisPolicy:
    """Read what `show_axis` wrote."""
    axis, degree, stream, origin = text.split(" ")
    return AxisPolicy(axis=axis, degree=int(degree), stream=stream, origin=int(origin))


def show_step(chunk: str, phase: Phase, part: Tags) -> str:
    """Write which chunk, phase and part a node is: `F[PP=0][MB=1]`."""
    return f"{phase}[{chunk}]" + (f"[{show_pairs(part)}]" if part else "")


def read_step(text: str) -> GroupMember:
    """Read what `show_step` wrote."""
    match = STEP.fullmatch(text)
    if match is None:
        raise BadLineError(f"{text!r} is not a node such as F[PP=0][MB=1]")
    assert match[1] in PHASES
    return GroupMember(phase=cast(Phase, match[1]), chunk=match[2], part=pairs(match[3] or ""))


class Reading:
    """A graph under construction, line by line."""

    def __init__(self, outline: CapturedModel) -> None:
        self.outline = outline
        self.known = {chunk.name for chunk in outline.chunks}
        self.directives: list[AppliedDirective] = []
        self.parts: dict[str, Tags] = {}
        self.transfers: dict[str, str] = {}
        self.budgets: dict[str, float] = {}
        self.reruns: dict[str, str] = {}
        self.precisions: dict[str, str] = {}
        self.narrow: set[str] = set()
        self.policies: dict[str, Policy] = {}
        self.nodes: dict[str, Compute] = {}
        self.orderings: list[Ordering] = []

    def take(self, kind: str, first: str, words: list[str]) -> None:
        """Take one line."""
        match kind:
            case "directive":
                self.directives.append(
                    build(AppliedDirective, title=name(first), **read_fields(words, ASKED))
                )
            case "chunk":
                self.take_chunk(self.chunk(name(first)), read_fields(words, CHUNK))
            case "node":
                step = read_step(first)
                values = read_fields(words, NODE)
                node = build(
                    Compute, chunk=self.chunk(step.chunk), phase=step.phase, part=step.part, **values
                )
                self.nodes[node.name] = node
            case "order":
                groups = GAP.join(words).split(AND)
                steps = tuple(tuple(read_step(text) for text in group.split(" ; ")) for group in groups)
                self.orderings.append(Ordering(by=int(first), groups=steps))
            case _:
                raise BadLineError(f"{kind!r} begins no line here")

    def chunk(self, called: str) -> str:
        """The name of a chunk that the outline has."""
        if called not in self.known:
            raise BadLineError(f"the model has no chunk {called!r}")
        return called

    def take_chunk(self, name: str, values: dict[str, object]) -> None:
        """Take what is said of a chunk."""
        self.parts[name] = cast(Tags, values.pop("parts", ()))
        if transfers := values.pop("transfers", None):
            self.transfers[name] = str(transfers)
        if (budget := values.pop("budget", None)) is not None:
            self.budgets[name] = cast(float, budget)
        if region := values.pop("again", None):
            self.reruns[name] = str(region)
        if precision := values.pop("precision", None):
            self.precisions[name] = str(precision)
        if values.pop("gather", None):
            self.narrow.add(name)
        if values:
            self.policies[name] = build(Policy, **values)


def read_graph(text: str, outline: CapturedModel, source: str = "graph") -> Graph:
    """Read a graph back from its text form."""
    reading = Reading(outline)
    each_line(
        text, reading.take, source=source, hint="use the text as `show_graph` writes it, and the same model"
    )
    if missing := reading.known - set(reading.parts):
        raise ConfigError(
            f"the text does not speak of {min(missing)}",
            by=source,
            facts={"chunks": ", ".join(sorted(missing))},
            hint="use the text as `show_graph` writes it, and the same model",
        )
    tags = {chunk.name: dict(chunk.tags) for chunk in outline.chunks}
    cells = {
        (node.chunk, node.part): ChunkRun(
            chunk=node.chunk, part=node.part, tags={**tags[node.chunk], **dict(node.part)}
        )
        for node in reading.nodes.values()
    }
    graph = Graph(outline=outline, nodes=reading.nodes, index=Index(cells.values()))
    return replace(
        graph,
        parts=reading.parts,
        policies=reading.policies,
        transfer_streams=reading.transfers,
        budgets=reading.budgets,
        reruns=reading.reruns,
        precisions=reading.precisions,
        gathered_in_fp8=frozenset(reading.narrow),
        orderings=tuple(reading.orderings),
        directives=tuple(reading.directives),
    )
