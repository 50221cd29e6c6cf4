"""Explains in words what a node does and which directives put it there."""

from collections.abc import Iterator
from difflib import get_close_matches

from piper.errors import ConfigError
from piper.ir.devices import show
from piper.ir.format import listed
from piper.ir.grouping import grouped
from piper.ir.node import Compute, Node
from piper.lower.state import LoweringState
from piper.plan.ops import DOES
from piper.plan.plan import Plans


def explain(state: LoweringState, plans: Plans, name: str) -> str:
    """Explain a node: what it does, where it runs, which directives shaped it, and what it waits for."""
    nodes = {node.name: node for node in state.sequence}
    if name not in nodes:
        close = get_close_matches(name, nodes, n=3)
        raise ConfigError(
            f"there is no node {name!r}",
            by="explain",
            facts={"close": ", ".join(close)} if close else {},
            hint="`piper plan --device N` lists nodes; BI and BW exist where an order names them",
        )
    node = nodes[name]
    lines = [f"{name}: {DOES[node.op]}"]
    lines.append(f"  devices  {show(node.devices)}, stream {node.stream or 'send, recv'}")
    lines += [f"  made by  {state.graph.directives[number]}" for number in node.origin]
    if isinstance(node, Compute):
        if node.again:
            lines.append(f"  again    {state.graph.options[node.chunk].rerun} keeps only what comes into it")
        chunk = state.graph.chunks[node.chunk]
        gflop = chunk.phases[node.phase].flops / 1e9
        lines.append(f"  work     {gflop:.3g} GFLOP, {len(chunk.params)} parameters, code {chunk.key[:12]}")
    lines += values(state, node)
    lines += [
        f"  after    {first} ({'our choice' if by < 0 else state.graph.directives[by]})"
        for first, then, by in state.temporal
        if then == name
    ]
    lines += positions(plans, name)
    return "\n".join(lines)


def origins(state: LoweringState, name: str) -> list[str]:
    """Return the directives that shaped a node, each with its source line."""
    node = next((node for node in state.sequence if node.name == name), None)
    return [state.graph.directives[number].title for number in node.origin] if node else []


def values(state: LoweringState, node: Node) -> Iterator[str]:
    """Yield a line for each value a node reads, with its writer, and for each it writes, with its readers."""
    writer = {value: other.name for other in state.sequence for value in other.writes}
    readers = grouped((value, other.name) for other in state.sequence for value in other.reads)
    for value in node.reads:
        where = "from the last step" if value in state.residents else f"from {writer[value]}"
        yield f"  reads    {value} {where}"
    for value in node.writes:
        users = [name for name in readers.get(value, []) if name != node.name]
        yield f"  writes   {value}" + (f" for {listed(users)}" if users else "")


def positions(plans: Plans, name: str) -> Iterator[str]:
    """Yield a line for each plan that runs a node, with the instruction numbers."""
    for plan in plans:
        at = [i for i, ins in enumerate(plan.instrs) if ins.node == name]
        if at:
            numbers = ", ".join(map(str, at))
            yield f"  in plan  of {show(plan.devices)}: instruction {numbers} of {len(plan.instrs)}"
