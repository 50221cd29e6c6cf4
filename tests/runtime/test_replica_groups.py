"""Replicas of ZeRO groups: sharded inside groups of neighbouring devices, summed across them shard by shard."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from piper.compiler import Program, compile
from piper.directives import Directive, remat, replicate, shard, split
from piper.errors import ScheduleError
from piper.ir.select import at
from piper.job import Job
from piper.plan.plan import Plans
from piper.plan.prove import ProofError
from piper.plan.text import read_plans, show_plans
from piper.proof.values import prove_values
from piper.run.launch import launch_inline, launch_local
from piper.runtime.worker import Options
from piper.workers.transport.fork_server import ForkServer
from tests import plain, zoo
from tests.runtime import divided
from tests.runtime.grid import Cell
from tests.runtime.sharing import Shared, one_core

pytestmark = pytest.mark.timeout(120)
FOUR = range(4)


@pytest.fixture(scope="module")
def shared() -> Shared:
    return Shared()


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with closing(ForkServer()) as started:
        yield started


def program(strategy: Sequence[Directive], case: str = "mlp", rows: int = 8) -> Program:
    """A model of the zoo with an optimizer that plain PyTorch has too."""
    model = zoo.case(case)
    return compile(
        Job(
            model=model.model,
            loss=model.loss,
            data=lambda: [model.batch(rows, 0)],
            strategy=strategy,
            optimizer=plain.sgd,
            precision="fp64",
        ),
        device="cpu",
    )


def adafactor(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.05)


def differs(
    made: Program,
    case: str = "mlp",
    rows: int = 8,
    forks: ForkServer | None = None,
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] = plain.sgd,
) -> float:
    """The largest difference of losses and of the state from plain PyTorch, after three steps."""
    model = zoo.case(case)
    batches = [model.batch(rows, seed) for seed in range(3)]
    wanted = plain.train(model.model, model.loss, batches, optimizer=optimizer)
    with launch_local(made, Options(), forks) if forks else launch_inline(made) as run:
        losses = [run.step(batch).loss for batch in batches]
        state = run.state_dict()
    return max(
        plain.largest_difference(wanted.state, state),
        *(abs(a - b) for a, b in zip(wanted.losses, losses, strict=True)),
    )


def across_groups(plans: Plans) -> int:
    """The bytes that each of four devices sends to devices of the other pair, without the totals."""
    (plan,) = plans
    return sum(
        ins.nbytes
        for ins in plan.instrs
        if ins.comm is not None
        and ins.op != "total"
        and any({device // 2 for device in group} == {0, 1} for group in plans.comms[ins.comm].groups)
    )


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_plain_pytorch_gives_the_same_numbers(zero: int, parts: int) -> None:
    groups = [replicate(at(), FOUR, zero=zero, within=2), split(at(), parts=parts)]
    assert differs(program(groups)) < 1e-9


@pytest.mark.parametrize(("devices", "within", "owners"), [(4, 2, 4), (8, 2, 4), (8, 2, 8), (8, 4, 8)])
def test_plain_pytorch_gives_the_numbers_of_state_sharded_further(
    devices: int, within: int, owners: int
) -> None:
    further = replicate(at(), range(devices), zero=3, within=within, optimizer_within=owners)
    assert differs(program([further, split(at(), parts=2)], rows=16), rows=16) < 1e-9


@pytest.mark.parametrize("owners", [None, 4])
def test_processes_give_the_numbers_of_plain_pytorch(forks: ForkServer, owners: int | None) -> None:
    groups = [replicate(at(), FOUR, zero=3, within=2, optimizer_within=owners), split(at(), parts=2)]
    assert differs(program(groups), forks=forks) < 1e-9


def test_the_state_is_sharded_over_all_and_parameters_inside_groups() -> None:
    """A device holds 1/4 of the state and 1/2 of the parameters, and sends no more across groups."""
    flat, groups, further = (
        program(
            [replicate(at(), FOUR, zero=3, within=within, optimizer_within=owners), split(at(), parts=2)]
        ).plans
        for within, owners in ((None, None), (2, None), (2, 4))
    )
    sizes = [
        {kind: sum(slot.nbytes for name, slot in plans.plans[0].residents.items() if name.kind == kind)
         for kind in ("param", "state")}
        for plans in (flat, groups, further)
    ]  # fmt: skip
    assert sizes[2] == {"param": sizes[1]["param"], "state": sizes[0]["state"]}
    assert 2 * sizes[0]["param"] == sizes[1]["param"] and 2 * sizes[0]["state"] == sizes[1]["state"]
    assert across_groups(further) == across_groups(groups)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_only_the_bytes_of_shards_travel_across_groups(zero: int) -> None:
    """An all-reduce of two sends as many bytes as it sums: each element of a shard once a step."""
    plans = program([replicate(at(), FOUR, zero=zero, within=2), split(at(), parts=2)]).plans
    across = across_groups(plans)
    shards = sum(bucket.padded // 2 * bucket.itemsize for bucket in plans.buckets.values())
    assert across == shards
    numel = sum(bucket.numel for bucket in plans.buckets.values())
    assert numel * 8 <= 2 * across < numel * 8 + 16 * len(plans.buckets)


CELLS = [
    Cell(case="mlp", schedule="1f1b", dp=4, zero=3, within=2, clip=0.3),
    Cell(case="decoder", schedule="1f1b", dp=4, zero=2, within=2, rows=1),  # tied over the stages
    Cell(case="decoder", schedule="none", dp=4, zero=3, within=2, rows=1, clip=0.3),
    Cell(case="dropout", schedule="zero-bubble", dp=4, zero=2, within=2),
    Cell(case="mlp", schedule="zbv", dp=4, zero=1, within=2),
    Cell(case="mlp", schedule="dualpipe-v", dp=4, zero=3, within=2, parts=4, rows=1),
    Cell(case="mlp", schedule="dualpipe", dp=2, zero=3, within=2, parts=4, rows=1),  # two groups in the union
    Cell(case="mlp", schedule="dualpipe", dp=4, zero=2, within=2, parts=4, rows=1),
    Cell(case="frozen", schedule="none", dp=4, zero=3, within=2, rows=1),
    Cell(case="sum_weight", schedule="interleaved-1f1b", dp=4, zero=3, within=2, clip=0.3),
    Cell(case="convnet", schedule="none", dp=4, zero=3, within=2),
    Cell(case="moe", schedule="none", dp=4, zero=3, within=2, rows=1),
    Cell(case="moe", schedule="none", dp=4, zero=3, within=2, ways=2, rows=1),  # experts fill a group
    Cell(case="moe", schedule="none", dp=4, zero=3, within=2, ways=4, rows=1),  # and all devices
    Cell(case="moe", schedule="1f1b", dp=8, zero=2, within=4, ways=2, rows=1, clip=0.3),
    Cell(case="decoder", schedule="1f1b", dp=4, zero=3, within=2, optimizer_within=4, rows=1, clip=0.3),
    Cell(case="mlp", schedule="dualpipe", dp=4, zero=3, within=2, optimizer_within=4, parts=4, rows=1),
    Cell(case="mlp", schedule="dualpipe", dp=4, zero=3, within=2, optimizer_within=8, parts=4, rows=1),
    Cell(case="frozen", schedule="zero-bubble", dp=4, zero=3, within=2, optimizer_within=4, rows=1),
    Cell(case="moe", schedule="none", dp=8, zero=3, within=4, optimizer_within=8, ways=2, rows=1),
    Cell(case="moe", schedule="none", dp=4, zero=3, within=2, optimizer_within=4, ways=2, rows=1, clip=0.3),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_compositions_give_the_numbers_of_one_device(shared: Shared, cell: Cell) -> None:
    with one_core():
        report = shared.check(cell)
    assert report.ok, report


def tensor_groups(model: divided.Model, owners: int | None = None) -> list[Directive]:
    """Groups of four devices: pairs divide the weights, and ZeRO shards over two pairs."""
    groups = [replicate(at(), range(8), zero=3, within=4, optimizer_within=owners)]
    return [*groups, *divided.tensor(model, dp=4, between=model.between), split(at(), parts=2)]


def context_groups(model: divided.Model) -> list[Directive]:
    """Groups of two devices that divide the sequence: each holds a term of every gradient."""
    return [
        replicate(at(), FOUR, zero=2, within=2),
        shard(at(), FOUR, 2, axis="CP", batch=divided.FIELDS, balance="zigzag"),
        remat(at(), 0.0),
    ]


def expert_groups(model: divided.Model) -> list[Directive]:
    """Groups of four devices: pairs divide attention, two pairs the experts, and groups replicate both."""
    everything = range(8)
    return [
        replicate(at(), everything, zero=3, within=4),
        *divided.tensor(model, dp=4),
        shard(at(EP="*"), everything, ways=2),
    ]


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("decoder", tensor_groups),
        ("decoder", partial(tensor_groups, owners=8)),
        ("decoder", context_groups),
        ("moe", expert_groups),
    ],
    ids=["tensor", "owners", "context", "experts"],
)
def test_sharded_regions_give_the_numbers_of_one_device(
    shared: Shared, model: str, strategy: Callable[[divided.Model], list[Directive]]
) -> None:
    report = divided.checked(divided.job_of(model, 1, strategy), shared)
    assert report.ok, report


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        ([replicate(at(), FOUR, zero=3, within=1)], "within must be a whole number from 2, got 1"),
        (
            [replicate(at(), FOUR, within=2)],
            "within= shards under ZeRO, and optimizer_within= beyond it under zero=3",
        ),
        ([replicate(at(), FOUR, zero=3, within=3)], "4 devices cannot form groups of within=3"),
        (
            [replicate(at(), range(12), zero=3, within=4, optimizer_within=6)],
            "12 devices cannot form groups of within=4, of which optimizer_within=6 hold several",
        ),
        (
            [replicate(at(), FOUR, zero=2, within=2, optimizer_within=4)],
            "within= shards under ZeRO, and optimizer_within= beyond it under zero=3",
        ),
        (
            [replicate(at(), range(8), zero=3, within=2), shard(at(EP="*"), range(8), ways=4)],
            "within=2 would cut groups of 4 devices apart",
        ),
        (
            [replicate(at(PP=0), [0, 1], zero=3, within=2), split(at(), parts=2),
             replicate(at(MB=0), FOUR, zero=3, within=2), replicate(at(MB=1), FOUR, zero=3, within=4)],
            "the microbatches of PP=0 contradict each other about its parameters",
        ),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_are_refused(strategy: list[Directive], what: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        program(strategy, "moe")
    assert what in str(raised.value), raised.value


@pytest.mark.parametrize(("devices", "owners"), [(4, 4), (8, 4)])
def test_an_optimizer_that_needs_whole_parameters_has_an_owner_for_each(devices: int, owners: int) -> None:
    """Shards are cut between parameters, so that those of a group, and the parts of owners, differ in size."""
    further = replicate(at(), range(devices), zero=3, within=2, optimizer_within=owners)
    whole = replace(program([further, split(at(), parts=2)], rows=16).job, optimizer=adafactor)
    made = compile(whole, device="cpu")
    assert any(len({*bucket.sizes(bucket.reductions[1], 0)}) > 1 for bucket in made.plans.buckets.values())
    assert differs(made, rows=16, optimizer=adafactor) < 1e-9


def test_the_proof_finds_parameters_whose_parts_are_not_gathered() -> None:
    made = program([replicate(at(), FOUR, zero=3, within=2, optimizer_within=4), split(at(), parts=2)])
    prove_values(made.plans, made.graph)
    assert read_plans(show_plans(made.plans)) == made.plans
    (plan,) = made.plans
    for word in ("for update", "over owners"):
        less = replace(plan, instrs=tuple(ins for ins in plan.instrs if word not in ins.node))
        assert len(less.instrs) < len(plan.instrs)
        with pytest.raises(ProofError):
            prove_values(replace(made.plans, plans=(less,)), made.graph)


def test_the_proof_finds_shards_that_are_not_summed_across_groups() -> None:
    made = program([replicate(at(), FOUR, zero=2, within=2), split(at(), parts=2)])
    plans = made.plans
    prove_values(plans, made.graph)
    assert read_plans(show_plans(plans)) == plans
    (plan,) = plans
    inside = replace(plan, instrs=tuple(ins for ins in plan.instrs if "across groups" not in ins.node))
    wrong = [replace(plans, plans=(inside,)), with_other_groups(plans)]
    for each in wrong:
        with pytest.raises(ProofError):
            prove_values(each, made.graph)


def with_other_groups(plans: Plans) -> Plans:
    """Plans that sum shards of different elements across the groups."""
    (name,) = (name for name, comm in plans.comms.items() if "across" in name)
    crossed = replace(plans.comms[name], groups=((0, 3), (1, 2)))
    return replace(plans, comms={**plans.comms, name: crossed})


def test_a_tied_parameter_in_different_groups_is_not_sharded() -> None:
    alone = [replicate(at(PP=0), FOUR, zero=3, within=2), replicate(at(PP=1), range(4, 8), zero=3)]
    made = program([*alone, split(at(), parts=2)], "decoder")
    assert differs(made, "decoder") < 1e-9
    assert any("ZeRO inside different groups" in reason for reason in made.plans.why)


@pytest.mark.slow
def test_fsdp2_gives_the_same_numbers(tmp_path: Path) -> None:
    """torch's `fully_shard` on a mesh of two replicas of two shards, in four processes."""
    path = tmp_path / "state.pt"
    script = Path(__file__).with_name("torch_hsdp.py")
    asked = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    root = str(script.parents[2])
    subprocess.run([*asked, str(script), str(path)], check=True, timeout=100, cwd=root,
                   env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"})  # fmt: skip
    model = zoo.case("mlp")
    with launch_inline(program([replicate(at(), FOUR, zero=3, within=2)])) as run:
        for seed in range(3):
            run.step(model.batch(8, seed))
        state = run.state_dict()
    assert plain.largest_difference(torch.load(path, weights_only=True), state) < 1e-9
