"""One policy for each chunk: what directives ask of single microbatches must agree, and holds for all."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from piper.errors import ScheduleError
from piper.ir.chunk_options import NO_POLICY, Policy
from piper.ir.graph import Graph
from piper.ir.ids import Tags, show_part

SHOWN_APART = ("zero", "ways", "axes", "by_expert", "origin")


def with_common_policies(graph: Graph) -> Graph:
    """Return the graph with one policy for each chunk. Refuse microbatches that ask for different ones.

    A chunk has its parameters once, whichever devices run its microbatches. Microbatches that are only placed
    ask for nothing.
    """
    asked = graph.chosen(lambda options: options.part_policies or None)
    policies = {chunk: common_policy(graph, chunk, by_part) for chunk, by_part in asked.items()}
    return graph.with_options(
        policies, lambda chunk, options: replace(options, policy=policies[chunk], part_policies={})
    )


def common_policy(graph: Graph, chunk: str, asked: Mapping[Tags, Policy]) -> Policy:
    """Return the policy that all microbatches of a chunk ask for. Refuse two that ask for different ones."""
    policies = dict(by_part(graph, chunk, asked))
    first, *others = policies
    for part in others:
        if meaning(policies[part]) != meaning(policies[first]):
            raise contradiction(graph, chunk, {each: policies[each] for each in (first, part)})
    return policies[first]


def by_part(graph: Graph, chunk: str, asked: Mapping[Tags, Policy]) -> Iterator[tuple[Tags, Policy]]:
    """Yield the policy of each microbatch that has one. A later split has divided what was asked for."""
    for part in graph.microbatches(chunk):
        known = [asked[part[:axes]] for axes in range(len(part), -1, -1) if part[:axes] in asked]
        if known or graph.policy(chunk) != NO_POLICY:
            yield part, known[0] if known else graph.policy(chunk)


def meaning(policy: Policy) -> Policy:
    """Return a policy without the directives that asked for it."""
    return replace(policy, origin=None, axes=tuple(replace(axis, origin=0) for axis in policy.axes))


def contradiction(graph: Graph, chunk: str, policies: Mapping[Tags, Policy]) -> ScheduleError:
    """Return the error for two microbatches that ask for different policies."""
    facts, numbers = {}, []
    for part, policy in policies.items():
        asked = [f"zero={policy.zero}", f"ways={policy.ways}"]
        asked += [
            f"{axis.axis}={axis.degree} of {', '.join((*axis.weights, *axis.fields))}" for axis in policy.axes
        ]
        others = {each.name: each.default for each in fields(Policy) if each.name not in SHOWN_APART}
        values = {name: getattr(policy, name) for name in others}
        asked += [f"{name}={value}" for name, value in values.items() if value != others[name]]
        number = max(n for n in (policy.origin, *(axis.origin for axis in policy.axes)) if n is not None)
        numbers.append(number)
        facts[f"{chunk}{show_part(part)}"] = f"{', '.join(asked)} by {graph.directives[number]}"
    return ScheduleError(
        f"the microbatches of {chunk} contradict each other about its parameters",
        by=graph.directives[max(numbers)].title,
        facts=facts,
        hint="its parameters live on the devices of all its microbatches: ask for the same on each",
    )
