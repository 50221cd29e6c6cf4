"""What else a run promises: the same bits however it runs, named failures, memory as planned, full state."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from inspect import cleandoc
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from piper.capture.trace.annotate import annotate
from piper.check.check import check
from piper.compiler import Program, compile
from piper.directives import replicate, split
from piper.errors import ConfigError, WorkerError
from piper.ir.chunk import Chunk, Phase
from piper.ir.dtypes import JobPrecision
from piper.ir.ids import Pass, SlotId
from piper.ir.select import at
from piper.job import Job
from piper.plan.plan import Plan
from piper.run.launch import launch_inline
from piper.runtime.comm.base import Form
from piper.runtime.comm.gloo import GlooComms
from piper.runtime.comm.inline import InlinePipe
from piper.runtime.context import forms_sent
from piper.runtime.executor import Executor
from piper.runtime.setup import initial_tensors, setup_of
from piper.runtime.worker import Options, Worker
from piper.workers.serve import WorkerAnswers
from tests import zoo
from tests.runtime.grid import Cell, batches, compiled, job
from tests.runtime.inline_workers import inline_group, workers_of
from tests.runtime.memory_meter import measured, meter_of, planned_bytes

PIPELINE = Cell(case="decoder", schedule="1f1b", dp=2, zero=2, clip=0.3)
EXPERTS = Cell(case="moe", schedule="zero-bubble", dp=2, zero=3, ways=2)


def trained(program: Program, cell: Cell, options: Options) -> tuple[list[float], dict[str, Tensor]]:
    with launch_inline(program, options) as run:
        losses = [run.step(batch).loss for batch in batches(cell, 3)]
        return losses, run.state_dict()


def assert_equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("cell", [PIPELINE, EXPERTS], ids=str)
def test_two_runs_are_equal_bit_by_bit_with_and_without_streams(cell: Cell) -> None:
    program = compiled(cell, "fp32")
    losses, state = trained(program, cell, Options(streams=True))
    for streams in (True, False):
        again, other = trained(program, cell, Options(streams=streams))
        assert again == losses
        assert_equal_bits(other, state)


@pytest.mark.parametrize("cell", [PIPELINE, EXPERTS], ids=str)
def test_gloo_gives_the_bits_of_threads(cell: Cell) -> None:
    program = compiled(cell, "fp32")
    _, state = trained(program, cell, Options())
    setup, initial, store = setup_of(program), initial_tensors(program).__getitem__, HashStore()
    devices = sorted(device for plan in program.plans for device in plan.devices)

    def work(device: int) -> Worker:
        comms = GlooComms(program.plans, device, store, "127.0.0.1", 20.0)
        worker = Worker(setup, device, comms, initial, Options(timeout=20.0))
        for batch in batches(cell, 3):
            worker.step(batch)
        return worker

    with ThreadPoolExecutor(len(devices)) as threads, launch_inline(program) as run:
        workers = dict(zip(devices, threads.map(work, devices), strict=True))
        inline_group(run).answers = {device: WorkerAnswers(worker) for device, worker in workers.items()}
        assert_equal_bits(run.state_dict(), state)


class Skips(nn.Module):
    """What the first region gives is read by both others, which run on the same devices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            first = self.layers[0](x).relu()
        with annotate("PP"):
            second = self.layers[1](first).relu()
        with annotate("PP"):
            return cast(Tensor, self.layers[2](first + second))


def skip_batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(0))}


def skips(devices: Sequence[Sequence[int]], precision: JobPrecision = "fp64") -> Job:
    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return cast(Tensor, model(batch["x"]).square().mean())

    first, *others = (replicate(at(PP=i), list(where)) for i, where in enumerate(devices))
    strategy = [first, *others, split(at(), axis="MB", parts=2)]
    return Job(model=Skips, loss=loss, data=lambda: [skip_batch()], strategy=strategy, precision=precision)


UNLIKE = [([0], [1, 2], [1, 2]), ([0, 1], [2], [2]), ([0, 1], [2, 3, 4, 5], [2, 3, 4, 5])]


@pytest.mark.parametrize("devices", UNLIKE, ids=str)
def test_sums_of_gradients_go_to_devices_with_other_samples(devices: Sequence[Sequence[int]]) -> None:
    """They are added where the value is read, and have the samples of those devices."""
    report = check(compile(skips(devices)), launch_inline, [skip_batch()], 1e-12)
    assert report.ok, report


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_what_arrives_has_the_form_that_plans_say(
    precision: JobPrecision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Receivers make room before anything arrives: for whole values, for rows of them, and for sums."""
    forms: list[tuple[Form, Form]] = []

    def look(pipe: InlinePipe, form: Form) -> Tensor:
        value = pipe.world.take(*pipe.key)
        forms.append((form, Form(tuple(value.shape), value.dtype)))
        return value

    monkeypatch.setattr(InlinePipe, "recv", look)
    with launch_inline(compile(skips(UNLIKE[2], precision))) as run:
        run.step(skip_batch())
    assert forms and [pair for pair in forms if pair[0] != pair[1]] == []


def test_a_device_refuses_to_send_what_its_receiver_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: Plan, chunks: Mapping[str, Chunk]) -> dict[tuple[str, str | None], Form]:
        return {of: Form((3, *form.shape[1:]), form.dtype) for of, form in forms_sent(plan, chunks).items()}

    monkeypatch.setattr("piper.runtime.context.forms_sent", wrong)
    with launch_inline(compile(skips(UNLIKE[0]))) as run, pytest.raises(WorkerError) as caught:
        run.step(skip_batch())
    assert "sends (2, 4) of torch.float64, not (3, 4) of torch.float64" in str(caught.value)


MEMORY = [
    Cell(case="decoder", schedule="1f1b", dp=2, zero=2),
    Cell(case="frozen", schedule="zero-bubble", dp=2, zero=3, parts=4),
    Cell(case="sum_weight", schedule="gpipe"),
    Cell(case="convnet", schedule="1f1b", dp=2),
]


@pytest.mark.parametrize("cell", MEMORY, ids=str)
def test_live_bytes_are_as_planned(cell: Cell) -> None:
    program = compiled(cell)
    with measured(), launch_inline(program, Options()) as run:
        for batch in batches(cell, 2):
            run.step(batch)
        for worker in workers_of(run).values():
            assert meter_of(worker).live == planned_bytes(worker)


@pytest.mark.parametrize("zero", [2, 3])
def test_no_whole_gradient_or_parameter_outlives_its_run_of_uses(zero: int) -> None:
    cell = Cell(case="mlp", schedule="interleaved-1f1b", dp=2, zero=zero, parts=4)
    held: list[set[str]] = []
    with measured(), launch_inline(compile(job(cell)), Options()) as run:
        worker = workers_of(run)[0]
        look_after_each(worker, held)
        run.step(batches(cell, 1)[0])
    plan, buckets = worker.env.plan, run.program.plans.buckets
    wholes = {
        slot
        for slot in plan.slots
        if slot.kind in ("whole", "gradient") or (slot.kind == "grad" and slot.run)
    }
    assert any(slot.kind == "whole" for slot in wholes) == (zero == 3)
    for slot in wholes:
        live = [i for i, slots in enumerate(held) if slot in slots]
        chunks = buckets[slot.owner].chunks
        others = [
            plan.instrs[i].node
            for i in live
            if plan.instrs[i].op == "compute" and plan.instrs[i].computes.chunk not in chunks
        ]
        assert len(others) <= 1, f"{slot} is live during {others}"  # gathered one computation ahead
    assert max(sum(slot in slots for slots in held) for slot in wholes) < len(held) / 2


def look_after_each(worker: Worker, held: list[set[str]]) -> None:
    """Note which slots live once each instruction has run, before its frees."""
    meter, names = meter_of(worker), {i: name for name, i in worker.env.index.items()}
    assert isinstance(worker.executor, Executor)
    lane = worker.executor.lanes[0]
    for i, (number, kernel, waits, signal, frees) in enumerate(lane):

        def look(kernel: Callable[[], None] = kernel, frees: tuple[int, ...] = frees) -> None:
            kernel()
            held.append({names[slot] for slot in (*meter.held, *frees)})

        lane[i] = (number, look, waits, signal, frees)


def test_a_schedule_of_learning_rates_and_a_clipped_gradient() -> None:
    cell = Cell(case="mlp", dp=2, zero=1, clip=0.05)

    def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def momentum(params: Any) -> torch.optim.Optimizer:  # noqa: ANN401
        return torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.1)

    report = check(compile(job(cell, scheduler=halved, optimizer=momentum)), launch_inline, batches(cell, 4))
    assert report.ok, report


def test_a_full_state_has_every_name_of_the_model() -> None:
    model = zoo.build(zoo.case("decoder"))
    with launch_inline(compiled(PIPELINE, "fp32")) as run:
        assert_equal_bits(run.state_dict(), model.state_dict())


class Wrong:
    """A program whose code for one phase of one chunk is changed."""

    def __init__(self, program: Program, chunk: str, phase: Phase, change: Callable[..., Any]) -> None:
        self.program, self.target, self.change = program, (chunk, phase), change

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.program, name)

    def code(self, chunk: Chunk, phase: Phase) -> Callable[..., tuple[Tensor, ...]]:
        code = self.program.code(chunk, phase)
        return (lambda *args: self.change(code(*args))) if (chunk.name, phase) == self.target else code


def test_a_wrong_backward_is_named() -> None:
    cell = Cell(case="mlp", dp=2)
    wrong = Wrong(compile(job(cell)), "PP=1", "B", lambda out: (out[0] * 1.001, *out[1:]))
    report = check(wrong, launch_inline, batches(cell, 1))
    assert not report.ok
    assert report.first_bad == "step 0: B[PP=1 MB=0] on device 2: PP=1.din0 differs by 0.001"


def test_a_failing_chunk_shows_the_plan_around_it_and_ends_the_others() -> None:
    cell = Cell(case="mlp", dp=2)

    def fail(out: object) -> None:
        raise ZeroDivisionError("in a chunk")

    wrong = Wrong(compile(job(cell)), "PP=1", "B", fail)
    with launch_inline(wrong) as run, pytest.raises(WorkerError) as caught:
        run.step(batches(cell, 1)[0])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    (note,) = caught.value.__cause__.__notes__
    assert note.startswith(("on device 2, at the arrow:\n", "on device 3, at the arrow:\n"))
    (arrow,) = [line for line in note.splitlines() if line.startswith("-->")]
    assert arrow.endswith("compute        B[PP=1 MB=0]")


def test_dropout_draws_anew_for_each_step_part_and_replica() -> None:
    cell = Cell(case="dropout", dp=2, parts=2, rows=4)
    one = batches(cell, 1)[0]
    same = {name: value[:4].repeat(4, *[1] * (value.dim() - 1)) for name, value in one.items()}
    program = compile(job(cell, optimizer=lambda params: torch.optim.SGD(params, lr=0.0)))
    with launch_inline(program, Options(keep_outputs=True)) as run:
        seen = []
        for _ in range(2):
            run.step(same)
            trails = run.trails()
            first = [Pass(phase="F", chunk="PP=0", part=(("MB", part),)) for part in (0, 1)]
            seen += [trails[d][run, SlotId("output", "PP=0")].clone() for d in (0, 1) for run in first]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    kept = math.fsum((value != 0).double().mean().item() for value in seen) / len(seen)
    assert 0.6 < kept < 0.9  # dropout of a quarter


def test_dropout_draws_by_the_slice_of_the_samples_on_devices_in_any_order() -> None:
    cell = Cell(case="dropout", dp=2, parts=2, rows=4)
    strategy = [replicate(at(PP=0), [1, 0]), replicate(at(PP=1), [3, 2], zero=2), split(at(), parts=2)]
    report = check(compile(job(cell, strategy=strategy)), launch_inline, batches(cell, 2))
    assert report.ok, report


def test_a_batch_with_other_axes_is_refused() -> None:
    cell = Cell(case="mlp", dp=2)
    with launch_inline(compile(job(cell))) as run, pytest.raises(ConfigError) as caught:
        run.step({name: value[:, None] for name, value in batches(cell, 1)[0].items()})
    assert str(caught.value) == cleandoc("""
        step: the batch is not like the one that was compiled
          wanted: x (8, 16), or other sizes of 2 axes
          got:    x (8, 1, 16)
          hint:   give every step a batch of the same fields and types, of the same number of axes; sizes may differ
    """)
