"""Explains in words what a node does and which directives put it there."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from piper.errors import ConfigError
from piper.ir.devices import show
from piper.ir.format import listed
from piper.ir.node import Compute, Node
from piper.lower.state import LoweringState
from piper.plan.plan import Plans

REDUCES = "Sum a bucket's gradients over some of its devices, each of which may keep only its shard."
DOES: Mapping[str, str] = {  # by operation
    "compute": "Run one phase of one chunk on one microbatch.",
    "transfer": "Send a value from one set of devices to another: a send and a receive in the plan.",
    "load": "Load one field of the batch, for one microbatch, on the devices that read it.",
    "add": "Sum two gradients of one value that came from two of its readers.",
    "counts": "Send each device of an expert group the number of rows it will get from each.",
    "exchange": "Send rows to the devices of their experts, or back: an all-to-all with uneven counts.",
    "collect": "Run a collective that changes the layout of a sharded value, or of its gradient.",
    "slice": "Keep a device's own slice of a value that its group holds.",
    "gather": "All-gather a bucket's sharded parameters, for a run of uses or after an update.",
    "accumulate": "Add one backward's weight gradients, or one microbatch's loss, to the sum of the step.",
    "all_reduce": REDUCES,
    "reduce_scatter": REDUCES,
    "reshard": "Give slices of gradients to devices that update parameters in full, or slices of these back.",
    "norm": "Square and sum the gradients of a device. Over all devices, each parameter counts once.",
    "total": "Sum the norms, losses and weights over all devices, so that every device has the result.",
    "update": "Step the optimizer over the parameters, or shards, that live on these devices.",
    "average": "Average what a device trains of a bucket with its counterparts in other groups, when due.",
    "merge": "Merge an average that has travelled behind other steps, and begin the next, when due.",
    "broadcast": "Broadcast the first replica's buffers to the others.",
    "protect": "Copy a part of the state into memory that outlives workers.",
    "mirror": "Give the copies of each device's state to the next device of its group, around the end.",
    "offload": "Copy values to memory of the host, which frees their memory on the device.",
    "fetch": "Copy values from memory of the host back to the device, ahead of their next use.",
}


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
    readers: dict[str, list[str]] = {}
    for other in state.sequence:
        for value in other.reads:
            readers.setdefault(value, []).append(other.name)
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
