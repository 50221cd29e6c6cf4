"""Steps issued as one CUDA graph: the bits of steps issued one by one, whatever is in them."""

import gc
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import piper
from piper.compiler import Program, compile
from piper.errors import WorkerError
from piper.plan.plan import Comm, Plans
from piper.run.launch import SingleRankRun, launch_inline, launch_local, launch_single_rank
from piper.run.run import Run
from piper.runtime.comm.nccl import NcclComms
from piper.runtime.cuda.graphs import WARM, GraphExecutor
from piper.runtime.stream_executor import StreamExecutor
from piper.runtime.worker import Options, Worker
from piper.workers.results import StepResult
from tests.runtime.grid import Cell, batches, job
from tests.runtime.inline_workers import workers_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STEPS = 8
GRAPHS, PLAIN = Options(graphs=True), Options()
LOCAL = [
    Cell(case="decoder", schedule="none", parts=4, clip=0.3),  # two regions that share a parameter
    Cell(case="sum_weight", schedule="none", parts=2, rows=4, clip=0.3),
    Cell(case="convnet", schedule="none", parts=2),  # buffers that every part writes
]
RANKS = [
    Cell(case="decoder_untied", schedule="1f1b", dp=2, zero=3, parts=4, clip=0.3, bucket_mb=0.02),
    Cell(
        case="decoder", schedule="zero-bubble", dp=2, zero=1, clip=0.3
    ),  # gathered in place, after the update
    Cell(case="convnet", schedule="1f1b", dp=2, zero=2),
]
Trained = tuple[list[StepResult], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def adamw(params: Iterable[Tensor]) -> Optimizer:
    return AdamW(params, lr=2**-7)


def falling(optimizer: Optimizer) -> LRScheduler:
    """Rates that single precision holds as they are."""
    return LambdaLR(optimizer, lambda step: 1 - step / 16)


def program_of(cell: Cell, **changes: object) -> Program:
    """A cell on one device, in parts."""
    asked: dict[str, object] = {
        "strategy": [piper.split(piper.at(), parts=cell.parts)],
        "optimizer": adamw,
        "scheduler": falling,
    }
    return compile(job(cell, **(asked | changes)), device="cuda")


def captured(worker: Worker) -> bool:
    return isinstance(worker.executor, GraphExecutor) and worker.executor.graph is not None


def stepped(run: Run, given: Sequence[Mapping[str, Tensor]]) -> Trained:
    return [run.step(batch) for batch in given], run.state_dict()


def trained(program: Program, given: Sequence[Mapping[str, Tensor]], options: Options) -> Trained:
    with launch_inline(program, options) as run:
        result = stepped(run, given)
        assert captured(workers_of(run)[0]) == options.graphs
        return result


def assert_equal_bits(one: Trained, other: Trained) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert [name for name, value in one[1].items() if not torch.equal(value, other[1][name])] == []


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("cell", LOCAL, ids=str)
def test_one_device(cell: Cell, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper.runtime.device_state.PORTION", 1000)  # in bf16, an update of several steps
    program, given = program_of(cell, precision=precision), batches(cell, STEPS)
    assert_equal_bits(trained(program, given, GRAPHS), trained(program, given, PLAIN))


@pytest.mark.parametrize("streams", [True, False])
def test_momentum_and_one_stream(streams: bool) -> None:
    cell = LOCAL[0]
    program = program_of(cell, optimizer=lambda params: SGD(params, lr=2**-4, momentum=0.5, nesterov=True))
    given = batches(cell, STEPS)
    as_graph = trained(program, given, Options(graphs=True, streams=streams))
    assert_equal_bits(as_graph, trained(program, given, Options(streams=streams)))


def test_compiled_chunks(tmp_path: Path) -> None:
    cell = LOCAL[0]
    asked = job(
        cell,
        strategy=[piper.split(piper.at(), parts=cell.parts)],
        optimizer=adamw,
        scheduler=falling,
        precision="fp32",
    )
    program = compile(asked, device="cuda", compile=True, cache=tmp_path)
    given = batches(cell, STEPS)
    assert_equal_bits(trained(program, given, GRAPHS), trained(program, given, PLAIN))


@pytest.mark.parametrize("compiled", [False, True])
def test_experts_of_one_device(compiled: bool, tmp_path: Path) -> None:
    """One kernel multiplies the rows of all experts: the host need not know how many each has."""
    cell = Cell(case="moe", schedule="none", parts=2, clip=0.3)
    strategy = [piper.split(piper.at(), parts=cell.parts)]
    asked = job(cell, strategy=strategy, optimizer=adamw, scheduler=falling, precision="bf16")
    program = compile(asked, device="cuda", compile=compiled, cache=tmp_path)
    given = batches(cell, STEPS)
    assert_equal_bits(trained(program, given, GRAPHS), trained(program, given, PLAIN))


def test_a_process_of_its_own() -> None:
    cell = LOCAL[0]
    program, given = program_of(cell), batches(cell, STEPS)
    with launch_local(program, GRAPHS) as run:
        got = [run.step(batch) for batch in given], run.state_dict()
    assert_equal_bits(got, trained(program, given, PLAIN))


def owned(run: SingleRankRun) -> dict[str, Tensor]:
    state = run.worker.env.state
    buffers = run.worker.buffers(name for name in state.buffers if f"buffer.{name}" in run.worker.env.index)
    return {
        **{name: run.worker.owned(name).cpu() for name in state.holdings},
        **{name: value.cpu() for name, value in buffers.items()},
    }


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("cell", RANKS, ids=str)
def test_one_rank_of_a_pipeline(cell: Cell, compiled: bool, tmp_path: Path) -> None:
    if compiled and cell is not RANKS[0]:
        pytest.skip("one is enough")
    asked = job(cell, optimizer=adamw, scheduler=falling, precision="fp32")
    program = compile(asked, device="cuda", compile=compiled, cache=tmp_path)
    given = batches(cell, STEPS)
    for plan in program.plans:
        results, peaks = [], []
        for options in (GRAPHS, PLAIN):
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # each side makes its own
            before = torch.cuda.memory_allocated()
            with launch_single_rank(program, f"rank:{plan.devices[-1]}", options) as run:
                results.append(([run.step(batch) for batch in given], owned(run)))
                assert captured(run.worker) == options.graphs
                measured = run.peak().measured
                assert measured is not None
                peaks.append(measured - before)
            del run
        assert_equal_bits(*results)
        assert peaks[0] < 1.05 * peaks[1] + 2**16, "a captured step holds what any other does"


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    cell = LOCAL[0]
    program, given = program_of(cell), batches(cell, STEPS + 4)
    with launch_inline(program, GRAPHS) as run:
        for batch in given[:STEPS]:
            run.step(batch)
        run.save(tmp_path / "step-8")
        wanted = stepped(run, given[STEPS:])
    for options in (GRAPHS, PLAIN):
        with launch_inline(program, Options(graphs=options.graphs, blank=True)) as run:
            assert run.load(tmp_path / "step-8").step == STEPS
            assert_equal_bits(stepped(run, given[STEPS:]), wanted)
            assert captured(workers_of(run)[0]) == options.graphs


def test_a_checkpoint_is_loaded_after_the_capture(tmp_path: Path) -> None:
    """What was captured works on memory that the loaded state does not lie in."""
    cell = LOCAL[0]
    program, given = program_of(cell), batches(cell, STEPS)
    with launch_inline(program, GRAPHS) as run:
        run.save(tmp_path / "step-0")
        first = stepped(run, given)
        assert captured(workers_of(run)[0])
        run.load(tmp_path / "step-0")
        assert not captured(workers_of(run)[0])
        assert_equal_bits(stepped(run, given), first)


def test_settings_that_a_graph_keeps_are_followed() -> None:
    def trained_with_decay(options: Options) -> Trained:
        with launch_inline(program, options) as run:
            stepped(run, given)
            optimizer = workers_of(run)[0].env.state.optimizer
            assert optimizer is not None
            optimizer.param_groups[0]["weight_decay"] = 0.5
            return stepped(run, given)

    cell = LOCAL[0]
    program, given = program_of(cell), batches(cell, WARM + 2)
    assert_equal_bits(trained_with_decay(GRAPHS), trained_with_decay(PLAIN))


def test_rates_are_rounded_to_single_precision() -> None:
    cell = LOCAL[0]
    program = program_of(cell, optimizer=lambda params: AdamW(params, lr=1e-3), precision="fp32")
    given = batches(cell, STEPS)
    one, other = (trained(program, given, options) for options in (GRAPHS, PLAIN))
    assert [r.loss for r in one[0]] == pytest.approx([r.loss for r in other[0]], rel=1e-5)
    for name, value in one[1].items():
        torch.testing.assert_close(value, other[1][name], rtol=1e-5, atol=1e-6)


def test_the_host_has_less_to_do() -> None:
    cell = LOCAL[0]
    program, given = program_of(cell), batches(cell, 1)[0]
    with launch_inline(program, GRAPHS) as run:
        for _ in range(WARM + 1):
            run.step(given)
        executor, times = workers_of(run)[0].executor, {}
        assert isinstance(executor, GraphExecutor)
        for name, issue in (("graph", executor.replay), ("plain", executor.inner.enqueue)):
            taken = []
            for _ in range(5):
                workers_of(run)[0].env.batch = given
                torch.cuda.synchronize()
                begin = perf_counter()
                with torch.no_grad():
                    issue()
                taken.append(perf_counter() - begin)
                torch.cuda.synchronize()
                executor.inner.drop()
            times[name] = statistics.median(taken)
    assert times["graph"] < times["plain"] / 4, times


class Chooses(nn.Module):
    """How many rows it keeps is known on the device alone."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            hidden = torch.tanh(self.into(x))
            kept = torch.nonzero(hidden[:, 0] > -2).squeeze(1)
            chosen: Tensor = self.out(hidden.index_select(0, kept))
        return chosen


def choosing(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()  # type: ignore[no-any-return]


def test_a_chunk_that_needs_the_host() -> None:
    given = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    program = compile(piper.Job(model=Chooses, loss=choosing, data=lambda: [given]), device="cuda")
    with launch_local(program, GRAPHS) as run, pytest.raises(WorkerError) as caught:
        for _ in range(WARM + 1):
            run.step(given)
    text = str(caught.value)
    assert "graphs: a step of this job cannot be issued as one graph" in text
    assert "needs the host: " in text
    assert "F[PP=0]" in text


def test_nccl_is_captured() -> None:
    """As far as one member shows it: collectives on a stream that is captured, and what they give again."""
    comm = Comm(name="self", kind="groups", groups=((0,),))
    plans = Plans(plans=(), comms={"self": comm}, buckets={}, seed=1.0, weighted=False)
    device = torch.device("cuda", 0)
    comms = NcclComms(plans, 0, HashStore(), device, 20.0)
    group = comms.group("self")
    given, out = torch.zeros(1000, device=device), torch.zeros(1000, device=device)
    home, side, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def work() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            summed = group.all_reduce(given.clone())
            group.all_gather(group.broadcast(group.reduce_scatter(summed, 1000)), out)
        torch.cuda.current_stream().wait_stream(side)

    with torch.cuda.stream(home):
        work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=home, capture_error_mode="thread_local"):
        work()
    for value in (1.0, 2.0):
        given.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, given)
    graph.reset()  # it uses the communicator
    comms.abort()


def test_streams_stay_what_they_are_without_graphs() -> None:
    program = program_of(LOCAL[0])
    with launch_inline(program, PLAIN) as run:
        executor = workers_of(run)[0].executor
        assert isinstance(executor, StreamExecutor)
        assert executor.home == torch.cuda.default_stream()
