"""Compiles the phases of chunks with Inductor: each distinct one once, cached on disk, sent as bytes.

Inductor unpickles the files of its own cache. So it works in a folder of this process alone, which holds only
files that this process wrote or that our cache has verified; see `capture/compile/cache.py`.
"""

import functools
import importlib
import inspect
import logging
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import sympy  # type: ignore[import-untyped]  # torch's symbols are its
import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import config, standalone_compile
from torch._inductor.codecache import CacheBase, torch_key
from torch._inductor.runtime.cache_dir_utils import default_cache_dir, temporary_cache_dir
from torch._inductor.standalone_compile import CompiledArtifact
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piper.capture.compile.cache import Cache, CacheEntry
from piper.capture.compile.hashing import Source, digest_of, node_lines
from piper.capture.compile.tuning import keep_measured, measuring_kernels, tuning_in
from piper.capture.trace.sizes import ROWS_WHILE_TRACING, unknown_rows
from piper.capture.trace_errors import quiet, reason
from piper.errors import CaptureError, PiperError
from piper.process.custom_operators import check_importable, modules_of
from piper.process.files import private_folder

log = logging.getLogger("piper")
_PATCHES = {
    "fallback_random": True,  # the same random numbers as without a compiler
    # Inductor compiles a phase as inference, and moves results that only the caller reads to the end. In a
    # backward these are all weight gradients, so the values they are computed from would live until then.
    "reorder_for_locality": False,
}
_OPTIONS = {"config_patches": _PATCHES}
_IN_ARTIFACT = {"aotautograd", "fxgraph", "locks", "__pycache__"}  # folders that loading an artifact fills
_BROKEN = (AssertionError, RuntimeError, ValueError, KeyError, TypeError, OSError, EOFError, ImportError)
Boxed = Callable[[list[Tensor]], Sequence[Tensor]]


class CompiledPhase:
    """A compiled phase, called as its `PhaseSpec` says.

    `boxed` takes the arguments in a list and empties it, so that memory with no other reference is
    free for reuse while the phase still runs. `plain` is the same code, not compiled, which stays in the
    process that compiled it.
    """

    boxed: Boxed
    plain: Callable[..., tuple[Tensor, ...]] | None = None

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        traced = torch.is_grad_enabled() and any(argument.requires_grad for argument in arguments)
        if self.plain is not None and traced:
            return self.plain(*arguments)  # compiled code cannot be differentiated
        return tuple(self.boxed(list(arguments)))


class Compiled(CompiledPhase):
    """A phase that is compiled as one graph. It is sent between processes as bytes."""

    def __init__(
        self,
        name: str,
        artifact: bytes,
        cache: Cache,
        modules: Sequence[str],
        entry: CacheEntry | None = None,
    ) -> None:
        """Load a compiled phase. entry: what the cache has under its name. None: it is looked up."""
        self.name, self.artifact, self.cache, self.modules = name, artifact, cache, tuple(modules)
        entry = entry or cache.find(name)
        if entry is not None and entry.artifact == artifact:
            cache.restore(entry)  # else its kernels are compiled again from the artifact
        self.boxed, unmeasured = _load(artifact, cache, modules)
        if unmeasured:
            self.boxed = self._measuring(self.boxed, unmeasured)

    def _measuring(self, code: Boxed, unmeasured: list[Path]) -> Boxed:
        """Return code whose first call, in which Inductor measures kernels, adds the fastest to the cache."""

        def measuring(arguments: list[Tensor]) -> Sequence[Tensor]:
            with measuring_kernels(self.cache):
                results = code(arguments)
            if self.boxed is measuring:
                self.boxed = code
                keep_measured(self.name, self.cache, unmeasured)
            return results

        return measuring

    def __reduce__(self) -> tuple[type["Compiled"], tuple[str, bytes, Cache, tuple[str, ...]]]:
        check_importable(self.modules)
        return Compiled, (self.name, self.artifact, self.cache, self.modules)


def loaded(name: str, source: Source, cache: Cache) -> Compiled | None:
    """Return the compiled form of a graph from the cache. None: it has none that this torch can load."""
    entry = cache.find(name)
    if entry is None:
        return None
    try:
        return Compiled(name, entry.artifact, cache, sorted(modules_of(source.module.graph)), entry)
    except PiperError:
        raise
    except _BROKEN as error:
        what = f"{source.phase} of {source.chunk}"
        log.info("%s is compiled again: what is cached fails to load. %s", what, reason(error))
        return None


def compiled(name: str, source: Source, cache: Cache) -> Compiled:
    """Compile a graph, and store it in the cache under its name."""
    try:
        artifact = _compile(source, cache)
        entry = CacheEntry(artifact=artifact, files={})  # nothing is looked up
        code = Compiled(name, artifact, cache, sorted(modules_of(source.module.graph)), entry)
        cache.keep(name, CacheEntry(artifact=artifact, files=_compiled_files(cache)))
    except PiperError:
        raise
    except _BROKEN as error:
        raise CaptureError(
            f"{source.phase} cannot be compiled",
            by=source.chunk,
            facts={"why": reason(error)},
            hint="leave compile=True out; the chunk then runs operation by operation",
        ) from error
    return code


@contextmanager
def _working(cache: Cache) -> Iterator[None]:
    """Let Inductor work quietly, in this process's folder, and keep this thread's gradient mode."""
    private_folder(Path(default_cache_dir()), "cache")  # precompiled headers are here in any case
    folder = str(cache.working_folder())
    with quiet(), torch.set_grad_enabled(torch.is_grad_enabled()), temporary_cache_dir(folder):
        yield


def _compiled_files(cache: Cache) -> dict[str, bytes]:
    """Return the libraries and sources that the compiler has made, by path within the working folder."""
    folder, files = cache.working_folder(), dict[str, bytes]()
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if path.is_file() and not _IN_ARTIFACT & set(inner.parts):
            with suppress(FileNotFoundError):  # a draft that the compiler has renamed since
                files[inner.as_posix()] = path.read_bytes()
    return files


def _compile(source: Source, cache: Cache) -> bytes:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    arguments = _stand_ins(source.arguments, mode)
    with _working(cache), tracing(TracingContext(mode)), tempfile.TemporaryDirectory() as folder:
        artifact = standalone_compile(
            source.module, [*arguments], dynamic_shapes="from_tracing_context", options=_OPTIONS
        )
        path = Path(folder) / "artifact"
        artifact.save(path=str(path), format="binary")
        return path.read_bytes()


def _load(artifact: bytes, cache: Cache, modules: Sequence[str]) -> tuple[Boxed, list[Path]]:
    """Load compiled code. Return it with the files of its kernels that have not been measured yet."""
    for module in modules:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "artifact"
        path.write_bytes(artifact)
        # Its kernels are compiled: with more threads, a process that loads it would start others to compile.
        alone = config.patch(compile_threads=1)
        with _working(cache), alone, tuning_in(cache.working_folder()) as unmeasured:
            loaded = CompiledArtifact.load(path=str(path), format="binary")
    # An artifact takes its arguments one by one, and so keeps them alive; its inner function takes a list.
    inner = inspect.getclosurevars(loaded._compiled_fn).nonlocals.get("compiled_fn")
    return inner if callable(inner) else (lambda arguments: loaded(*arguments)), unmeasured


def read_triton(device: str) -> None:
    """Read Triton's library in another thread: names hold its digest, which takes long and is then known."""

    def read() -> None:
        with suppress(*_BROKEN):  # it is raised where a name is asked for
            _machine(device)

    threading.Thread(target=read, name="triton", daemon=True).start()


def name_of(source: Source) -> str:
    """Return a hash of all that decides the compiled form: graph, arguments, torch and machine."""
    machine = _machine(source.arguments[0].device.type if source.arguments else "cpu")
    values = (
        f"{_known(value.shape)} {_known(value.stride())} {value.dtype} {value.device.type}"
        for value in source.arguments
    )
    nodes = node_lines(source.module.graph.nodes, source.module, {})
    return digest_of([torch.__version__, torch_key().hex(), str(_OPTIONS), machine, *values, *nodes])


def _known(sizes: Sequence[int | torch.SymInt]) -> str:
    """Return sizes as text, with every symbol that routing decides written as `rows`."""
    exprs = [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in sizes]
    rows = sympy.Symbol("rows")
    return ",".join(str(expr.subs(dict.fromkeys(expr.free_symbols, rows))) for expr in exprs)


@functools.cache
def _machine(device: str) -> str:
    """Return the properties of this machine on which code for a kind of device depends."""
    if device == "cpu":
        return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{device} {CacheBase.get_system()}"


def _stand_ins(values: Sequence[Tensor], mode: FakeTensorMode) -> list[Tensor]:
    """Return fake tensors of `mode` like the given ones. Sizes that routing decides become new symbols."""
    shapes, symbols = mode.shape_env, dict[sympy.Symbol, sympy.Symbol]()
    assert shapes is not None

    def size(given: int | torch.SymInt) -> int | torch.SymInt:
        if not isinstance(given, torch.SymInt) or not given.node.expr.free_symbols:
            return int(given)
        for symbol in given.node.expr.free_symbols - symbols.keys():
            symbols[symbol] = unknown_rows(shapes).node.expr
        fresh = given.node.expr.xreplace(symbols)
        hint = int(fresh.subs(dict.fromkeys(fresh.free_symbols, ROWS_WHILE_TRACING)))
        symbolic = shapes.create_symintnode(fresh, hint=hint)
        assert isinstance(symbolic, torch.SymInt)
        return symbolic

    with mode:
        return [
            torch.empty_strided(
                [size(length) for length in value.shape],
                [size(step) for step in value.stride()],
                dtype=value.dtype,
                device=value.device,
            )
            for value in values
        ]
