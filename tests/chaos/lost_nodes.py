"""Lose machines of a Ray cluster: hosts made of namespaces, and nodes that share this machine."""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("ray")

from piper.compiler import compile
from piper.run.launch import launch_inline
from piper.run.recovery import recovering
from piper.run.run_events import Event
from piper.runtime.worker import Options
from piper.workers.results import StepResult
from tests.chaos.lost_hosts import lose_hosts
from tests.chaos.parts import Asked, Seen, mismatches, recoveries
from tests.hosts import test_ray as on_hosts
from tests.hosts.machines import Host
from tests.ray import test_recovery as on_nodes
from tests.runtime.grid import batches


def ray_hosts(asked: Asked) -> Seen:
    """Lose hosts of a Ray cluster that has a spare."""

    def begin(made: Sequence[Host], run: Path) -> subprocess.Popen[str]:
        for host in made:
            on_hosts.join(host, made[0])
        return on_hosts.train(made[0], "copied", run, "--spares", "1")

    return lose_hosts(asked, begin, on_hosts.other_working)


def ray_nodes(asked: Asked) -> Seen:
    """End one of three nodes on this machine, and add another one, which is the next spare.

    Every second loss comes before its agent is warm. Then the time that counts is what follows.
    """
    events, seen, given = list[Event](), Seen(), batches(on_nodes.PAIR, 50)
    program = compile(on_nodes.protected())
    results: list[StepResult] = []
    with (
        on_nodes.three_nodes() as nodes,
        recovering(program, "ray", Options(), retries=10**6, notify=events.append, spares=1) as run,
    ):
        spares = 1  # that have become warm, once the last one is
        for number in asked.numbers():
            results += [run.step(given[(len(results) + n) % 50]) for n in range(3)]
            if number % 2 == 0:
                on_nodes.train_until_warm(run, events, spares, given, results)
                seen.warm.append(latest(events, "warm").seconds or 0.0)
            known, began = recoveries(events), time.monotonic()
            on_nodes.lose(nodes, run, 1)
            seen.events += 1
            while recoveries(events) == known and time.monotonic() < began + 120:
                results.append(run.step(given[len(results) % 50]))
            took = time.monotonic() - began
            if recoveries(events) > known and (found := latest(events, "recovery")).source == "memory":
                seen.recovered += 1
                seen.seconds.append(took - found.phases.get("warm", 0.0))
            spares = sum(event.event == "warm" for event in events) + 1
            nodes.add_node(num_cpus=1)
    with launch_inline(program) as whole:
        wanted = [whole.step(given[step % 50]) for step in range(len(results))]
    seen.identical = results == wanted and not mismatches(events)
    return seen


def latest(events: Sequence[Event], name: str) -> Event:
    return next(event for event in reversed(events) if event.event == name)
