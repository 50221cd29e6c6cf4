"""Buffers of sharded expert regions: read ones are sharded as the experts are, written ones cannot be."""

import math

from piper.errors import ScheduleError
from piper.ir.devices import show
from piper.ir.graph import Graph


def check_expert_buffers(graph: Graph) -> None:
    """Refuse to shard a buffer that a region writes, or that a region with other experts uses too."""
    outline = graph.outline
    placements = {node.chunk: node for node in graph.nodes.values()}
    users: dict[str, str] = {}
    for chunk in outline.chunks:
        for name in chunk.buffers:
            first = users.setdefault(name, chunk.name)
            degrees = {
                user: math.prod(held.degree for held in graph.policy(user).placements(name))
                for user in (first, chunk.name)
            }
            sharded = max(first, chunk.name, key=lambda user: degrees[user])
            asked = f"ways {degrees[sharded]} over {show(placements[sharded].devices)}"
            if degrees[first] != degrees[chunk.name]:
                raise ScheduleError(
                    f"the buffer {name} would be sharded in one region and not in another",
                    by=graph.placed_by(placements[sharded]),
                    facts={"asked": f"{asked} for {sharded}", "but": f"{first} and {chunk.name} share it"},
                    hint="give each region a buffer of its own, or shard both alike",
                )
            if name in chunk.mutated and degrees[chunk.name] > 1:
                raise ScheduleError(
                    f"the buffer {name} cannot be sharded with its experts",
                    by=graph.placed_by(placements[chunk.name]),
                    facts={
                        "asked": asked,
                        "but": f"{chunk.name} writes it, from the rows of {degrees[sharded]} devices at once",
                    },
                    hint="write it outside the part between route and unroute, or do not shard this region",
                )
