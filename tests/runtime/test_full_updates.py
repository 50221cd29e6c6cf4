"""Optimizers that need whole tensors where tensor parallelism or experts shard them, against plain PyTorch."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import piper
from piper.check.check import check
from piper.compiler import Program, compile
from piper.directives import Directive, average, protect, replicate, shard, split
from piper.errors import ScheduleError
from piper.ir.select import at
from piper.job import Job
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.plan.prove import ProofError
from piper.plan.text import read_plans, show_plans
from piper.proof.values import prove_values
from piper.run.launch import launch_inline, launch_local
from piper.runtime.worker import Options
from piper.schedules import one_f_one_b
from piper.workers.transport.versions import Versions
from tests import plain
from tests.runtime import divided, grid
from tests.runtime.divided import Model

Make = Callable[[Iterable[Tensor]], Optimizer]


OPTIMIZERS: dict[str, Make] = {"muon": grid.muon, "adafactor": grid.adafactor}


def tp2pp2(model: Model) -> list[Directive]:
    """Put each of two stages on four devices: pairs with shards, ZeRO over the two pairs."""
    placed: list[Directive] = []
    for stage in range(2):
        devices = list(range(4 * stage, 4 * stage + 4))
        placed += [
            replicate(at(PP=stage), devices, zero=2),
            shard(at(PP=stage), devices, 2, axis="TP", weights=model.weights, between=model.between),
        ]
    return [*placed, split(at(), axis="MB", parts=2), *one_f_one_b(2, 2)]


STRATEGIES = {**divided.STRATEGIES, "tp2dp2z2pp2": (2, tp2pp2)}


def job(model: str, strategy: str, optimizer: str) -> Job:
    made = divided.job_of(model, *STRATEGIES[strategy])
    return replace(made, optimizer=OPTIMIZERS[optimizer])


def alone(made: Job, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Train in plain PyTorch, without Piper. Return the losses and the state."""
    torch.manual_seed(0)
    model = made.model().double()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = made.optimizer([p for _, p in named])
    losses = []
    for batch in divided.batches(steps):
        model.zero_grad()
        total, weight = cast(tuple[Tensor, Tensor], made.loss(model, batch))
        (total / weight).backward()
        losses.append(float((total / weight).detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, model.state_dict()


def differs(program: Program, launch: Callable[[Program], piper.Run] = launch_inline) -> float:
    """Train for three steps, and return the largest difference from plain PyTorch."""
    with launch(program) as run:
        losses = [run.step(batch).loss for batch in divided.batches(3)]
        state = run.state_dict()
    wanted, named = alone(program.job)
    worst = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    return max(worst, plain.largest_difference({k: named[k] for k in state}, state))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("decoder", "tp2dp2z1"),
        ("gpt2", "tp2dp2z3"),  # the norms of Llama compute in float32
        pytest.param("decoder", "tp2dp2", marks=pytest.mark.slow),
        pytest.param("decoder", "tp2dp2z2pp2", marks=pytest.mark.slow),
        pytest.param("decoder", "tp2cp2dp2", marks=pytest.mark.slow),
        pytest.param("decoder4", "tp4", marks=pytest.mark.slow),
        pytest.param("decoder", "tp4", marks=pytest.mark.slow),  # two devices have the same heads of keys
        pytest.param("gpt2", "tp2dp2z2", marks=pytest.mark.slow),
        pytest.param("gpt2", "tp2pp2", marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_in_plain_pytorch(model: str, strategy: str, optimizer: str) -> None:
    program = compile(job(model, strategy, optimizer), device="cpu")
    assert any(bucket.slices for bucket in program.plans.buckets.values())
    assert differs(program) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["tp2ep2", "sp2ep4"])
def test_experts_are_updated_as_on_one_device(strategy: str, optimizer: str) -> None:
    program = compile(job("moe", strategy, optimizer), device="cpu")
    report = check(program, launch_inline, divided.batches(2), tol=1e-9)
    assert report.ok, report


@pytest.fixture(scope="module")
def program() -> Program:
    return compile(job("decoder", "tp2dp2z1", "adafactor"), device="cpu")


def test_processes_have_the_same_numbers(program: Program) -> None:
    assert differs(program, launch_local) < 1e-9


def test_each_tensor_has_one_owner_and_owners_have_about_as_much(program: Program) -> None:
    loads = dict.fromkeys(range(4), 0)
    largest = 0
    for bucket in program.plans.buckets.values():
        if bucket.slices:
            full = bucket.update
            assert {piece.name: piece.numel for piece in full.pieces} == {
                piece.name: 2 * piece.numel for piece in bucket.pieces
            }
            for piece in full.pieces:
                loads[full.groups[0][full.owner(piece)]] += piece.numel
                largest = max(largest, piece.numel)
    assert min(loads.values()) and max(loads.values()) - min(loads.values()) <= largest


def test_plans_say_what_is_resharded(program: Program) -> None:
    text = show_plans(program.plans)
    assert read_plans(text) == program.plans
    found = [ins for plan in program.plans for ins in plan.instrs if ins.op == "reshard"]
    assert {ins.writes[0].kind for ins in found} == {"grad_full", "param"}
    for ins in found:
        bucket = program.plans.buckets[ins.bucket]
        assert ins.nbytes == bucket.elements() * 8 // 2, "half of the slices that a device owns, in float64"


def changed(program: Program, edit: Callable[[Instr], Instr | None]) -> Plans:
    """Return plans with some instructions changed, or left out."""
    plans = [
        replace(plan, instrs=tuple(new for ins in plan.instrs if (new := edit(ins)) is not None))
        for plan in program.plans
    ]
    return replace(program.plans, plans=tuple(plans))


def test_the_proof_notices_what_is_not_resharded(program: Program) -> None:
    def without(kind: str) -> Callable[[Instr], Instr | None]:
        return lambda ins: None if ins.op == "reshard" and ins.writes[0].kind == kind else ins

    for kind, why in (
        ("grad_full", "grad_full, which holds nothing"),
        (
            "param",
            "gathers PP=0/0.param into PP=0/0.param for 'PP=0/0'; PP=0/0.param holds the in full parameters",
        ),
    ):
        with pytest.raises(ProofError) as error:
            prove_values(changed(program, without(kind)), program.graph, clip=True, whole=True)
        assert why in str(error.value)


def test_the_proof_notices_slices_that_are_updated_by_themselves(program: Program) -> None:
    name, bucket = next((n, b) for n, b in program.plans.buckets.items() if b.slices)
    edited = {**program.plans.buckets, name: replace(bucket, slices=(), bounds=bucket.bounds[::2])}
    with pytest.raises(ProofError, match="slices of parameters that its optimizer needs in full"):
        prove_values(replace(program.plans, buckets=edited), program.graph, clip=True, whole=True)


def test_a_checkpoint_goes_on_under_another_layout(program: Program, tmp_path: Path) -> None:
    first, second, third = divided.batches(3)
    with piper.launch(program) as run:
        run.step(first)
        run.save(tmp_path / "one")
    for number, strategy in enumerate(("tp2dp2z3", "tp2")):
        made = job("decoder", strategy, "adafactor")
        other = compile(
            made if number else replace(made, strategy=[replicate(at(), [0, 1], zero=2)]), device="cpu"
        )
        with piper.launch(other, resume=tmp_path / ("two" if number else "one")) as run:
            run.step((second, third)[number])
            if not number:
                run.save(tmp_path / "two")
            state = run.state_dict()
    _, wanted = alone(program.job)
    assert plain.largest_difference({k: wanted[k] for k in state}, state) < 1e-9


def test_state_that_is_updated_in_full_stays_on_the_device() -> None:
    made = job("decoder", "tp2", "adafactor")
    away = piper.offload(at(), what="optimizer")
    with pytest.raises(ScheduleError, match="the state of Adafactor cannot be offloaded"):
        compile(replace(made, strategy=[*made.strategy, away]), device="cpu")  # type: ignore[misc]


def test_a_lost_device_leaves_what_it_updates_in_the_memory_of_another(program: Program) -> None:
    asked = [*job("decoder", "tp2dp2z1", "adafactor").strategy, protect(at(), copies=1, apart="device")]  # type: ignore[misc]
    protected = compile(replace(program.job, strategy=asked), device="cpu", captured=program)
    first, second, third = divided.batches(3)
    versions = Versions(protected.plans)
    with launch_inline(protected, Options(), versions.files) as run:
        run.session.protect()
        run.step(first)
        run.step(second)
        wanted, unread, state = run.step(third), dict(run.session.unread), run.state_dict()
    for descriptor in versions.descriptors[1]:
        os.ftruncate(descriptor, 0)
    assert versions.newest() == 2 and versions.whole
    with launch_inline(protected, Options(blank=True), versions.files) as run:
        run.session.restore(2, unread)
        assert run.step(third) == wanted
        assert all(torch.equal(state[name], value) for name, value in run.state_dict().items())
    versions.close()


@pytest.mark.slow
@pytest.mark.parametrize("choices", [{"within": 4}, {"within": 4, "optimizer_within": 8}, {}], ids=str)
def test_groups_of_zero_and_groups_that_average(program: Program, choices: dict[str, int]) -> None:
    devices = list(range(8))
    weights = divided.MODELS["decoder"]().weights
    zero = replicate(at(), devices, zero=3, **choices)  # type: ignore[arg-type]
    strategy = [zero, shard(at(), devices, 2, axis="TP", weights=weights)]
    if not choices:
        strategy.append(average(at(), across=[0, 4], every=1))
    made = compile(replace(program.job, strategy=strategy), device="cpu", captured=program)
    assert any(bucket.slices for bucket in made.plans.buckets.values())
    report = check(made, launch_inline, divided.batches(2), tol=1e-9)
    assert report.ok, report
