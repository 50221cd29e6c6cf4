"""Compiled phases: the numbers of those that are not compiled, kept on disk, and sent to other processes."""

import math
import pickle
import re
import shutil
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from piper.capture.autodiff.code import GraphCode
from piper.capture.autodiff.differentiate import Captured, differentiate
from piper.capture.compile import inductor
from piper.capture.compile.cache import Cache
from piper.capture.compile.flat_gradients import FlatPhase
from piper.capture.compile.inductor import Compiled
from piper.capture.trace.annotate import annotate
from piper.capture.trace.trace import trace
from piper.errors import CaptureError
from piper.experts import grouped_mm, route, unroute
from piper.ir.chunk_options import CodeOptions
from piper.workers.transport.serialize import pack, unpack
from tests import zoo
from tests.capture.capturing import difference
from tests.capture.machine import Backward
from tests.capture.test_remat import Feeds

pytestmark = pytest.mark.timeout(180)  # a compiler for C++ is at work
KINDS: tuple[Backward, ...] = ("whole", "split")
EXPERTS = 4


class Routed(nn.Module):
    """A layer, then experts that each see the rows whose first entry says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 16, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = torch.tanh(self.first(x))
            chosen = (x[:, 0] * 100).abs().long() % EXPERTS
            order = chosen.argsort(stable=True)
            counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, chosen, torch.ones_like(chosen))
            with annotate("EP"):
                rows, received = route(h[order], counts)
                y = grouped_mm(torch.sigmoid(rows) * 2, self.experts, received)
                y = unroute(y, received, x.shape[0])
        return torch.empty_like(y).index_copy(0, order, y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A captured model whose code is compiled, and where that is kept."""

    code: Captured
    folder: Path


def captured(folder: Path, budget: float | None = None) -> Captured:
    found = trace(Routed, zoo.regression, zoo.vectors(8, 0), 8, "fp64", compiled=True)
    options = {chunk.name: CodeOptions(budget=budget) for chunk in found.outline.chunks}
    return differentiate(found, options, Cache(folder=folder))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("cache")
    return Made(code=captured(folder), folder=folder)


def apart(code: Captured, backward: Backward, seed: int = 1) -> float:
    """How far compiled chunks are from autograd on the whole model."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Routed().double())
    batch = {name: value.double() for name, value in zoo.vectors(8, seed).items()}
    return difference(code, zoo.regression, models[0], models[1], batch, backward)


@pytest.mark.slow
def test_compiled_chunks_equal_autograd(made: Made) -> None:
    for backward in KINDS:
        assert apart(made.code, backward) < 1e-12
    assert apart(made.code, "whole", seed=2) < 1e-12  # other rows for each expert
    assert all(isinstance(code, Compiled) for code in made.code.built.values() if has_results(code))


def has_results(code: object) -> bool:
    return not isinstance(code, torch.fx.GraphModule)


@pytest.mark.slow
def test_a_second_capture_compiles_nothing(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    apart(made.code, "whole")
    monkeypatch.setattr(inductor, "standalone_compile", None)
    assert apart(captured(made.folder), "whole") < 1e-12


@pytest.mark.slow
def test_recomputation_is_compiled_too(made: Made) -> None:
    code = captured(made.folder, 0.0)
    for backward in KINDS:
        assert apart(code, backward) < 1e-12
    (expert,) = (chunk for chunk in code.outline.chunks if chunk.kind == "expert")
    assert expert.saved == ()


class Tower(nn.Module):
    """Layers whose activations take more memory than their weights."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 16, 16, 16, 4]
        self.layers = nn.ModuleList(nn.Linear(16, width, bias=False) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.slow
def test_weight_gradients_are_not_put_off_to_the_end(tmp_path: Path) -> None:
    found = trace(Tower, zoo.regression, zoo.vectors(512, 0), 512, "fp64", compiled=True)
    code = differentiate(found, cache=Cache(folder=tmp_path))
    code.phase(code.outline.chunks[0].key, "B")
    (text,) = (path.read_text() for path in tmp_path.rglob("*.py") if "extern_kernels.mm" in path.read_text())
    made = re.findall(r"empty_strided_cpu\(\((\d+), 16\)", text)
    assert made.count("16") == 4
    assert made.index("16") < len(made) - 1 - made[::-1].index("512"), "a weight's gradient before an input's"


@pytest.mark.slow
def test_gradients_are_written_into_given_memory(tmp_path: Path) -> None:
    """Products, each where the caller wants it and nowhere else: written, or added to what is there."""
    found = trace(Feeds, zoo.regression, zoo.vectors(8, 0), 8, "fp64", compiled=True)
    code = differentiate(
        found, dict.fromkeys(("PP=0", "PP=1"), CodeOptions(flat=True)), Cache(folder=tmp_path)
    )
    chunk = code.outline.chunks[1]
    spec = chunk.phases["B"]
    assert sorted(spec.in_place) == ["down.weight", "gate.weight", "q.weight", "up.weight"]
    assert {*spec.grad_params} - {*spec.in_place} == {"norm.weight"}
    phase = code.phase(chunk.key, "B")
    assert isinstance(phase, FlatPhase)
    held = code.codes[chunk.key]
    assert isinstance(held, GraphCode)
    given = [torch.randn(fake.shape, dtype=fake.dtype) for fake in held.examples("B")]
    targets = [torch.full(shape, math.nan, dtype=dtype) for shape, dtype in phase.like]
    travelled = unpack(pack(phase))
    assert isinstance(travelled, FlatPhase)
    results = travelled.boxed_into(list(given), targets)
    assert [id(results[place]) for place in phase.results] == [id(target) for target in targets]
    wanted = held.build("B")(*given)
    for result, value in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-12, atol=1e-12 * value.abs().max().item())
    again = travelled.boxed_into(list(given), targets, add=True)
    for place, (result, value) in enumerate(zip(again, wanted, strict=True)):
        times = 2.0 if place in phase.results else 1.0
        torch.testing.assert_close(result, times * value, rtol=1e-12, atol=1e-12 * value.abs().max().item())
    (text,) = (
        path.read_text() for path in tmp_path.rglob("*.py") if path.read_text().count("mm_into.default") > 3
    )
    assert "(48, 16), (16, 1), torch.float64)" not in text, "memory for a weight's gradient"


def expert_forward(made: Made) -> Compiled:
    (chunk,) = (chunk for chunk in made.code.outline.chunks if chunk.kind == "expert")
    code = made.code.phase(chunk.key, "F")
    assert isinstance(code, Compiled)
    return code


def expert_arguments(rows: int) -> list[Tensor]:
    counts = torch.tensor([rows - rows // 3, 0, rows // 3, 0])
    return [torch.randn(rows, 16, dtype=torch.float64), counts, torch.randn(EXPERTS, 16, 4).double()]


def test_one_artifact_serves_any_number_of_rows(made: Made) -> None:
    code = expert_forward(made)
    for rows in (7, 0, 1, 33):
        given = expert_arguments(rows)
        wanted = grouped_mm(torch.sigmoid(given[0]) * 2, given[2], given[1])
        torch.testing.assert_close(code(*given)[0], wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_compiled_phase_travels_as_bytes(made: Made, tmp_path: Path) -> None:
    given = expert_arguments(9)
    (tmp_path / "sent").write_bytes(pack((expert_forward(made), given)))
    program = (
        "import sys\n"
        "from piper.workers.transport.serialize import pack, unpack\n"
        "code, given = unpack(open(sys.argv[1], 'rb').read())\n"
        "open(sys.argv[1], 'wb').write(pack(code(*given)[0]))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "sent")], check=True, timeout=120)
    assert torch.equal(
        torch.as_tensor(unpack((tmp_path / "sent").read_bytes())), expert_forward(made)(*given)[0]
    )


def test_what_is_compiled_is_loaded_without_processes_and_threads_that_compile(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.standalone_compile import CompiledArtifact

    sent = pack(expert_forward(made))
    started: list[str] = []
    threads: list[int | None] = []
    load = CompiledArtifact.load

    def watched(*, path: str, format: str) -> object:
        threads.append(config.compile_threads)
        return load(path=path, format=format)  # type: ignore[arg-type]

    monkeypatch.setattr(AsyncCompile, "pool", lambda: started.append("threads"))
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: started.append("processes"))
    monkeypatch.setattr(CompiledArtifact, "load", watched)
    with config.patch(compile_threads=4):
        code = unpack(sent)
        assert config.compile_threads == 4
    assert started == [] and threads == [1]
    given = expert_arguments(9)
    assert isinstance(code, Compiled) and torch.equal(code(*given)[0], expert_forward(made)(*given)[0])


def test_boxed_arguments_are_let_go(made: Made) -> None:
    given = expert_arguments(9)
    seen = weakref.ref(given[0])
    result = expert_forward(made).boxed(given)
    assert given == [] and seen() is None
    assert len(result[0]) == 9


def test_a_damaged_entry_is_made_again(made: Made) -> None:
    before = expert_forward(made)
    entries = [path for path in (made.folder / "chunks").rglob("*") if path.is_file()]
    assert entries
    for path in entries:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = captured(made.folder)
    (chunk,) = (chunk for chunk in again.outline.chunks if chunk.kind == "expert")
    given = expert_arguments(5)
    with pytest.warns(UserWarning, match="is damaged: the code is compiled again") as warned:
        assert torch.equal(again.phase(chunk.key, "F")(*given)[0], before(*given)[0])
    assert len(warned) == 1
    assert any(Cache(folder=made.folder).find(path.name) is not None for path in entries)


@dataclass(frozen=True)
class Bomb:
    """A pickle that leaves a file when it is read."""

    target: str

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.target, "w")


def planted(source: Path, folder: Path, target: Path) -> int:
    """Write a bomb beside and over every file that Inductor reads by unpickling it, under another folder."""
    pickles = [path for path in source.rglob("*") if {"fxgraph", "aotautograd"} & set(path.parts)]
    files = [path.relative_to(source) for path in pickles if path.is_file()]
    for inner in files:
        for path in (folder / inner, folder / inner.parent / "0"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(Bomb(str(target))))
    return len(files)


def test_pickles_that_others_put_into_the_cache_are_not_read(made: Made, tmp_path: Path) -> None:
    before, target = expert_forward(made), tmp_path / "exploded"
    given = expert_arguments(5)
    cache = Cache(folder=made.folder)
    for folder in ("inductor", "fxgraph", ".", "work", "work/another.host-1-5"):
        assert planted(cache.working_folder(), made.folder / folder, target) >= 2
    shutil.rmtree(cache.working_folder())  # as another process begins
    again = captured(made.folder)
    (chunk,) = (chunk for chunk in again.outline.chunks if chunk.kind == "expert")
    assert torch.equal(again.phase(chunk.key, "F")(*given)[0], before(*given)[0])
    assert not target.exists()


def test_a_phase_that_cannot_be_compiled(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> SimpleNamespace:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(inductor, "standalone_compile", fail)
    code = captured(tmp_path)
    (chunk,) = (chunk for chunk in code.outline.chunks if chunk.kind == "expert")
    with pytest.raises(CaptureError) as error:
        code.phase(chunk.key, "F")
    assert str(error.value) == (
        f"{chunk.name}: F cannot be compiled\n"
        "  why:  RuntimeError: no kernel for this\n"
        "  hint: leave compile=True out; the chunk then runs operation by operation"
    )
