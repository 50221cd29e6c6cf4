"""Processes that compile graphs: what they store is used, and what they cannot do is done here."""

import logging
import operator
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import cast

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler

from piper.capture.compile import phases
from piper.capture.compile.cache import Cache, CacheEntry
from piper.capture.compile.hashing import Source
from piper.capture.compile.inductor import Compiled, name_of
from piper.capture.compile.phases import compile_phases
from piper.capture.compile.servers import Compilation, CompileServers, request_of
from piper.capture.recordings import Capturing, Recordings
from piper.errors import CaptureError
from piper.ir.chunk import Phase
from tests import zoo


def source(phase: Phase, number: float, operations: int = 1) -> Source:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(operations):
        value = graph.call_function(torch.ops.aten.add.Tensor, (value, number))
    graph.output((value,))
    with FakeTensorMode():
        arguments = [torch.empty(3, 4)]
    return Source(module=fx.GraphModule({}, graph), arguments=arguments, chunk="PP=0", phase=phase)


ASKED: dict[tuple[str, Phase], Source] = {
    ("a", "F"): source("F", 1.0),
    ("a", "B"): source("B", 2.0, operations=3),
    ("b", "F"): source("F", 1.0),  # equal to the first
}


class NamedCode(str):
    """Stands for compiled code."""


def mute(servers: CompileServers, code: str) -> None:
    """Add a process that is not a real server."""
    servers.processes.append(
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    )


@pytest.mark.parametrize("code", ["", "import pickle, sys; pickle.dump('', sys.stdout.buffer)"])
def test_what_servers_leave_is_compiled_here_once(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []

    def compiled(name: str, given: Source, cache: Cache) -> Compiled:
        made.append(given.phase)
        return cast(Compiled, NamedCode(f"code of {given.phase}"))

    monkeypatch.setattr(phases, "compiled", compiled)
    servers, other = CompileServers(), list[str]()
    mute(servers, code)
    (running,) = servers.processes
    with caplog.at_level(logging.INFO, "piper"):
        found = compile_phases(ASKED, Cache(folder=tmp_path), servers, lambda: other.append("drawn"))
    assert sorted(made) == ["B", "F"] and other == ["drawn"]
    assert [*map(str, found.values())] == ["code of F", "code of B", "code of F"]
    assert servers.processes == [] and running.wait(10) in (0, -signal.SIGTERM)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "Compiling graph 1 of 2: B of PP=0"  # the larger one
    assert second == "Compiling graph 2 of 2: F of PP=0"


def test_a_failure_of_the_other_work_ends_the_servers(tmp_path: Path) -> None:
    servers = CompileServers()
    mute(servers, "import time; time.sleep(60)")
    (running,) = servers.processes

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_phases(ASKED, Cache(folder=tmp_path), servers, fail)
    assert running.wait(10) == -signal.SIGTERM


def test_graphs_of_unknown_sizes_are_not_sent(tmp_path: Path) -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    given, shapes = source("F", 1.0), ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        rows = shapes.create_unbacked_symint()
        unknown = Source(
            module=given.module, arguments=[torch.empty(rows, 4)], chunk=given.chunk, phase=given.phase
        )
    assert request_of("name", unknown, Cache(folder=tmp_path)) is None
    assert request_of("name", given, Cache(folder=tmp_path)) is not None


def test_a_graph_arrives_as_it_was_sent(tmp_path: Path) -> None:
    given = source("F", 1.0)
    graph = given.module.graph
    *_, last = graph.nodes
    with graph.inserting_before(last):  # a pickle of a module would run it and send its value
        zero = graph.call_function(torch.ops.aten.scalar_tensor.default, (0,), {"dtype": torch.int64})
        several = graph.call_function(torch.ops.aten.split.Tensor, (last.args[0][0], 2, -1))
        item = graph.call_function(operator.getitem, (several, 1))
    last.args = ((item, zero),)
    given.module.recompile()
    request = request_of("name", given, Cache(folder=tmp_path))
    assert request is not None
    sent = GraphPickler.loads(request.source, FakeTensorMode())
    assert isinstance(sent, Source) and (sent.chunk, sent.phase) == (given.chunk, given.phase)
    assert [(each.shape, each.dtype) for each in sent.arguments] == [((3, 4), torch.float32)]
    arrived = sent.module
    arrived.recompile()
    assert [str(node.target) for node in arrived.graph.nodes] == [str(node.target) for node in graph.nodes]
    x = torch.arange(12.0).view(3, 4)
    first, second = arrived(x)
    assert first.tolist() == [[3.0, 4.0], [7.0, 8.0], [11.0, 12.0]] and second.tolist() == 0


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Compiled]:
    def compiled(name: str, given: Source, cache: Cache) -> Compiled:
        raise CaptureError("compiled here", by=given.chunk, hint="let servers do it")

    monkeypatch.setattr(phases, "compiled", compiled)
    return compiled


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("refusing")
def test_servers_store_what_this_process_loads(tmp_path: Path) -> None:
    cache, servers = Cache(folder=tmp_path / "cache", key=tmp_path / "key"), CompileServers()
    servers.start("cpu", 1)
    (running,) = servers.processes
    given = {name_of(each): each for each in ASKED.values()}
    Compilation(servers.processes, given, cache, lambda name: None).wait()
    found = compile_phases(ASKED, cache, servers, lambda: None)
    x = torch.arange(12.0).view(3, 4)
    assert [float(found[key](x)[0].sum()) for key in ASKED] == [78.0, 138.0, 78.0]
    assert running.wait(20) == 0


def test_a_server_ends_at_once_with_the_processes_it_has_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    servers = CompileServers()
    mute(servers, code)
    (running,) = servers.processes
    assert running.stdout is not None
    child = Path(f"/proc/{int(running.stdout.readline())}/stat")
    servers.close()
    assert running.wait(10) == -signal.SIGTERM
    while child.exists() and child.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        time.sleep(0.05)  # the test has a time limit


def test_servers_end_with_an_interpreter_that_begins_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    servers = CompileServers()
    mute(servers, "import time; time.sleep(60)")
    (process,) = servers.processes
    monkeypatch.setattr(Thread, "start", refuse)
    servers.close()
    with process:
        assert process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize(("layers", "filled", "started"), [(3, False, 0), (40, False, 1), (40, True, 0)])
def test_servers_are_started_for_large_models_and_an_empty_cache(
    layers: int, filled: bool, started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.async_compile import AsyncCompile

    asked, pools = list[str](), list[bool]()
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: pools.append(True))
    monkeypatch.setattr(CompileServers, "start", lambda self, device: asked.append(device))
    cache = Cache(folder=tmp_path / "cache", key=tmp_path / "key")
    if filled:
        cache.keep("a1" * 32, CacheEntry(artifact=b"", files={}))
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    known = Recordings(
        model=lambda: model, loss=zoo.regression, precision="fp32", device="cuda", compiled=True, fields={}
    )
    Capturing(batch={}, recordings=known, cache=cache)._start_compilers(model)
    assert asked == ["cuda"] * started
    assert pools == ([] if filled else [True])
