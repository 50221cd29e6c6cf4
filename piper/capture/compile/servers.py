"""Processes that compile graphs for this one. Each takes a graph, compiles it and stores it in the cache.

They are started while the model is traced, because a process takes as long to import torch as a trace takes.
Whatever they cannot do is left to the process that asked: it compiles the graph itself, and reports errors.
"""

import importlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Lock, Thread

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from piper.capture.compile.cache import Cache
from piper.capture.compile.hashing import Source
from piper.process.custom_operators import modules_of

log = logging.getLogger("piper")
CORES = 4  # of this machine, for each server
MOST_SERVERS = 4
IDLE = 120.0  # seconds after which a server that has nothing to do ends
GRACE = 10.0  # seconds that a server has to end
_START = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({device!r}, {threads})"
_BROKEN_OFF = (OSError, EOFError, ValueError, pickle.UnpicklingError)  # ValueError: the pipe is closed


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """A graph to compile. It can be read once the modules that define its operators are imported."""

    name: str
    modules: tuple[str, ...]
    source: bytes  # by `GraphPickler`: another pickle of a module would run operations without tensors
    cache: Cache


def request_of(name: str, source: Source, cache: Cache) -> CompileRequest | None:
    """Return a graph as a request. None: it cannot be sent, reads attributes, or has unknown sizes."""
    from torch.fx._graph_pickler import GraphPickler, Options  # it takes a second to import

    sizes = [size for value in source.arguments for size in (*value.shape, *value.stride())]
    attributes = any(node.op == "get_attr" for node in source.module.graph.nodes)
    if attributes or any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    try:
        sent = GraphPickler.dumps(source, Options(ops_filter=None))
    except Exception:  # noqa: BLE001  whatever a pickle refuses is compiled by the process that asks
        return None
    modules = tuple(sorted(modules_of(source.module.graph)))
    return CompileRequest(name=name, modules=modules, source=sent, cache=cache)


def start_kernel_compilers() -> None:
    """Start the processes in which Inductor compiles kernels: it uses them once they are ready."""
    from torch._inductor.async_compile import AsyncCompile  # it takes a second to import

    AsyncCompile.use_process_pool()


class CompileServers:
    """Processes that compile graphs. None of them runs until they are started."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, device: str, count: int | None = None) -> None:
        """Start servers, unless they run. count: how many. None: as many as this machine has cores for."""
        cores = len(os.sched_getaffinity(0))
        count = min(MOST_SERVERS, cores // CORES) if count is None else count
        if self.processes or not count:
            return
        threads = max(1, cores // (count + 1))
        code = _START.format(path=sys.path, module=__name__, device=device, threads=threads)
        self.processes += [
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that it ends with the processes that compile its kernels
            )
            for _ in range(count)
        ]
        weakref.finalize(self, end, self.processes)

    def close(self) -> None:
        """End all servers. Idempotent."""
        end(self.processes)


class Compilation:
    """Graphs that servers compile, while the process that asked does other work or compiles some itself."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        graphs: Mapping[str, Source],
        cache: Cache,
        report: Callable[[str], None],
    ) -> None:
        """Begin to compile graphs, the largest first. report: is called with the name of each that begins."""
        self.report, self.taking = report, Lock()
        self.shared: Queue[str] = Queue()  # graphs that servers may take
        self.own: list[str] = []  # those that cannot be sent
        self.requests: dict[str, CompileRequest] = {}
        for name in sorted(graphs, key=lambda name: len(graphs[name].module.graph.nodes), reverse=True):
            request = request_of(name, graphs[name], cache) if processes else None
            if request is None:
                self.own.append(name)
            else:
                self.requests[name] = request
                self.shared.put(name)
        for process in processes if self.requests else ():
            Thread(target=self._drive, args=(process,), daemon=True).start()

    def _drive(self, process: subprocess.Popen[bytes]) -> None:
        """Let one server compile graphs until none is left. If it ends, others compile what it leaves."""
        assert process.stdin is not None and process.stdout is not None
        with suppress(*_BROKEN_OFF, Empty):
            failure = pickle.load(process.stdout)  # it is ready, or says why not
            while not failure:
                name = self._next()
                try:
                    pickle.dump(self.requests[name], process.stdin)
                    process.stdin.flush()
                    failure = pickle.load(process.stdout)
                finally:
                    self.shared.task_done()
            log.debug("A process that compiles failed: %s", failure)

    def take(self) -> Iterator[str]:
        """Yield the names of graphs that no server has begun, for the caller to compile."""
        for name in self.own:
            self.report(name)
            yield name
        with suppress(Empty):
            while True:
                name = self._next()
                self.shared.task_done()
                yield name

    def _next(self) -> str:
        with self.taking:  # so that what is reported first was taken first
            name = self.shared.get_nowait()
            self.report(name)
            return name

    def wait(self) -> None:
        """Wait until the servers have compiled what they began. The cache then has it, if all went well."""
        self.shared.join()


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End processes at once: one that still imports torch would take a core from the first steps of a run."""
    ending = [*processes]
    processes.clear()
    for process in ending:
        assert process.stdin is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(BrokenPipeError):
            process.stdin.close()

    def reap() -> None:
        """Wait for the processes, and kill those that do not end in time."""
        for process in ending:
            with process:  # which closes its pipes and waits for it
                try:
                    process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)

    with suppress(RuntimeError):  # from Python 3.12 on no thread begins while the interpreter ends
        Thread(target=reap, daemon=True).start()


def serve(device: str, threads: int) -> None:
    """Compile the graphs that arrive on the standard input, and answer on what was the standard output."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that temporary files are removed
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what torch prints is no answer
    from torch._inductor import config

    config.compile_threads = threads
    answer = warm_up(torch.device(device, 0)) if device == "cuda" else ""
    requests = sys.stdin.buffer
    while True:
        pickle.dump(answer, answers)
        answers.flush()
        if not select.select([requests], [], [], IDLE)[0]:
            return
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        answer = compile_request(request)


def warm_up(device: torch.device) -> str:
    """Compile a small graph, so that what a compiler sets up once is there when the first request comes."""
    from piper.capture.compile.inductor import name_of  # it takes a second to import

    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    graph.output((graph.call_function(torch.ops.aten.relu.default, (product,)),))
    with FakeTensorMode():
        arguments = [torch.empty(8, 8, dtype=torch.bfloat16, device=device)]
    source = Source(module=fx.GraphModule({}, graph), arguments=arguments, chunk="", phase="F")
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(folder=Path(folder), key=Path(folder) / "key")
        request = request_of(name_of(source), source, cache)
        assert request is not None
        return compile_request(request)


def compile_request(request: CompileRequest) -> str:
    """Compile a graph and store it. Return why that failed, or an empty text."""
    from torch.fx._graph_pickler import GraphPickler

    from piper.capture.compile.inductor import compiled, name_of

    try:
        for needed in request.modules:
            importlib.import_module(needed)
        source = GraphPickler.loads(request.source, FakeTensorMode())
        assert isinstance(source, Source)
        source.module.recompile()  # what is sent is the graph alone
        if name_of(source) != request.name:
            return "another graph arrived than was sent"
        compiled(request.name, source, request.cache)
    except Exception as error:  # noqa: BLE001  the process that asked compiles it, and reports the error
        return f"{type(error).__name__}: {error}"
    return ""
