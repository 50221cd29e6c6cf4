"""Ring attention gives the numbers of one device, with everything else; its shifts are few, and are checked."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from piper.check.check import check
from piper.check.localise import Launch
from piper.cli.plan import bytes_by_kind
from piper.compiler import Program, compile
from piper.directives import Directive, order, remat, replicate, shard, split
from piper.errors import ScheduleError
from piper.ir.ids import Pass
from piper.ir.select import at
from piper.job import Job
from piper.models import decoder
from piper.models.layers import Attention
from piper.plan.instr import Instr
from piper.plan.text import read_plans, show_plans
from piper.run.launch import launch_inline, launch_local
from piper.runtime import kernels
from piper.runtime.context import Bound, Env
from piper.schedules import one_f_one_b, zbv
from tests.covering import Choices, covering_each, selected
from tests.runtime.divided import FIELDS, MODELS, Model, batches, checked, context, job_of
from tests.runtime.sharing import Shared

Strategy = Callable[[Model], list[Directive]]


def ring(devices: Sequence[int], ways: int | None = None, stage: int | None = None) -> Directive:
    """Divide the sequence of all regions, or of one stage, over rings in zigzag."""
    where = at() if stage is None else at(PP=stage)
    return shard(where, devices, ways, axis="CP", batch=FIELDS, attention="ring", balance="zigzag")


def with_tensors(model: Model, *, innermost: str) -> list[Directive]:
    """Divide weights and the sequence, each over pairs of four devices."""
    devices = [0, 1, 2, 3]
    between = 1 if innermost == "TP" else None  # the other order is refused
    tensor = shard(at(), devices, 2, axis="TP", weights=model.weights, between=between)
    return [tensor, ring(devices, 2)] if innermost == "TP" else [ring(devices, 2), tensor]


def stages(homes: Sequence[int], schedule: Sequence[Directive]) -> list[Directive]:
    """Put each stage on a ring of two. homes: the ring of each stage."""
    rings = [ring([2 * pair, 2 * pair + 1], stage=stage) for stage, pair in enumerate(homes)]
    return [*rings, split(at(), axis="MB", parts=4), *schedule]


STRATEGIES: Mapping[str, tuple[int, Strategy]] = {  # stages, and the directives
    "ring2": (1, lambda m: context(2, "ring")),
    "ring2 zigzag": (1, lambda m: context(2, "ring", "zigzag")),
    "ring4": (1, lambda m: context(4, "ring")),
    "ring4 zigzag": (1, lambda m: context(4, "ring", "zigzag")),
    "ring2 outside tp2": (1, lambda m: with_tensors(m, innermost="TP")),
    "ring2 inside tp2": (1, lambda m: with_tensors(m, innermost="CP")),
    **{
        f"ring2 dp2 zero={zero}": (
            1,
            lambda m, zero=zero: [replicate(at(), [0, 1, 2, 3], zero=zero), ring([0, 1, 2, 3], 2)],  # type: ignore[misc]
        )
        for zero in range(4)
    },
    "ring2 1f1b": (2, lambda m: stages([0, 1], one_f_one_b(2, 4))),
    "ring2 zbv": (4, lambda m: stages([0, 1, 1, 0], zbv(2, 4))),
    "ring2 remat": (1, lambda m: [*context(2, "ring", "zigzag"), remat(at(), 0.0)]),
    "ring2 remat across": (1, lambda m: [*context(2, "ring"), remat(at(), 0.0, across="PP")]),
}
FEW = [("decoder", "ring2 dp2 zero=3")]
ALL = [
    (model, strategy)
    for model in ("decoder", "llama", "qwen3", "mistral", "gpt2")
    for strategy in STRATEGIES
    if (model, strategy) not in FEW
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What a strategy chooses on each axis of the matrix of rings."""

    ways: int = 2
    zigzag: bool = False
    tensors: str = "none"
    zero: int | None = None
    schedule: str = "none"
    remat: str = "none"


AXES: Mapping[str, Axes] = {
    "ring2": Axes(),
    "ring2 zigzag": Axes(zigzag=True),
    "ring4": Axes(ways=4),
    "ring4 zigzag": Axes(ways=4, zigzag=True),
    "ring2 outside tp2": Axes(zigzag=True, tensors="outside"),
    "ring2 inside tp2": Axes(zigzag=True, tensors="inside"),
    **{f"ring2 dp2 zero={zero}": Axes(zigzag=True, zero=zero) for zero in range(4)},
    "ring2 1f1b": Axes(zigzag=True, schedule="1f1b"),
    "ring2 zbv": Axes(zigzag=True, schedule="zbv"),
    "ring2 remat": Axes(zigzag=True, remat="within"),
    "ring2 remat across": Axes(remat="across"),
}


def division(cell: tuple[str, str]) -> Choices:
    """Return how a cell divides its model, which is the same whatever its ZeRO and schedule are."""
    model, strategy = cell
    axes = AXES[strategy]
    return {"model": model, "ways": axes.ways, "zigzag": axes.zigzag, "tensors": axes.tensors}


def composition(cell: tuple[str, str]) -> Choices:
    """Return what a cell composes, which is the same for all models."""
    return asdict(AXES[cell[1]])


UNLIKE = [cell for cell in ALL if cell[0] != "llama"]  # it is to Mistral as in `test_divided.py`
CHOSEN = covering_each(UNLIKE, division, composition, given=FEW)


def job(model: str, strategy: str) -> Job:
    """Return the job of a model under a strategy, in fp64."""
    return job_of(model, *STRATEGIES[strategy])


@pytest.fixture(scope="module")
def shared() -> Shared:
    """Share captures between tests, those of one model at a time."""
    return Shared()


def agrees(made: Job, shared: Shared, launch: Launch = launch_inline) -> None:
    report = checked(made, shared, launch)
    assert report.ok, report
    assert report.notes == ()


@pytest.mark.parametrize(("model", "strategy"), FEW)
def test_a_ring_has_the_numbers_of_one_device(shared: Shared, model: str, strategy: str) -> None:
    agrees(job(model, strategy), shared)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "strategy"), selected(ALL, CHOSEN))
def test_every_model_in_every_ring(shared: Shared, model: str, strategy: str) -> None:
    agrees(job(model, strategy), shared)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring2 zigzag", "ring4", "ring2 inside tp2"])
def test_a_ring_of_processes(shared: Shared, strategy: str) -> None:
    agrees(job("decoder", strategy), shared, launch_local)


class Dropping(nn.Module):
    """Attention without a causal mask, and dropout of what is added to the residual."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.attention = Attention(16, 4, 2, 4, qk_norm=False, eps=1e-6)
        self.drop, self.causal = nn.Dropout(0.5), causal

    def forward(self, x: Tensor) -> Tensor:
        rotation = torch.ones(2, x.shape[1], 4, dtype=x.dtype, device=x.device)
        if self.causal:
            result: Tensor = x + self.drop(self.attention(x, rotation))
            return result
        heads = (*x.shape[:2], -1, 4)
        q, k, v = (getattr(self.attention, name)(x).view(heads).transpose(1, 2) for name in ("q", "k", "v"))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        result = x + self.drop(self.attention.out(y.transpose(1, 2).flatten(2)))
        return result


@pytest.mark.parametrize("causal", [True, False])
def test_residuals_drop_what_one_device_drops(causal: bool) -> None:
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    agrees(
        Job(
            model=lambda: Dropping(causal),
            loss=lambda model, batch: model(batch["x"]).pow(3).mean(),
            data=lambda: [{"x": x}],
            strategy=[
                shard(at(), [0, 1], axis="CP", batch={"x": 1}, attention="ring", balance="zigzag"),
                split(at(), axis="MB", parts=2),
            ],
            precision="fp64",
        ),
        Shared(),
    )


@cache
def small(layers: int, ways: int = 4, *more: Directive) -> Program:
    """Compile a decoder of some layers on a ring: 2 samples, 16 tokens, 2 heads of keys of size 8."""
    sizes = decoder.Config(
        vocab=64, dim=32, layers=layers, heads=4, kv_heads=2, head_dim=8, hidden=64, stages=1
    )
    made = Job(
        model=lambda: decoder.Decoder(sizes),
        loss=decoder.token_loss,
        data=lambda: [{name: value[:2] for name, value in batches(1)[0].items()}],
        strategy=[*context(ways, "ring", "zigzag"), *more],
        precision="fp64",
    )
    return compile(made, device="cpu")


def collectives(made: Program) -> Counter[tuple[str, str]]:
    """Count the collectives of a plan: the pass and the kind of each."""
    return Counter(
        (ins.collects.run.phase, ins.collects.how.op)
        for plan in made.plans
        for ins in plan.instrs
        if ins.op in ("collect", "slice")
    )


def test_a_layer_passes_keys_and_values_on_three_times_on_a_ring_of_four() -> None:
    assert collectives(small(2)) - collectives(small(1)) == {("F", "shift"): 6, ("B", "shift_back"): 6}


def test_a_shift_moves_one_block_of_keys_before_heads_are_repeated() -> None:
    """A block is 2 samples x 2 heads x 4 tokens x 8 numbers of 8 bytes: 1024 bytes from each of 4 devices."""
    moved = bytes_by_kind(small(1))
    assert moved["shift"] == moved["shift_back"] == 4 * 6 * 1024
    assert "all_gather" not in moved and "reduce_scatter" not in moved


def test_blocks_travel_while_those_before_are_attended_to() -> None:
    """No step waits for the shifts that bring the next block, and no pass for those that take one away."""
    plan = small(1).plans.of(0)
    computes = [i for i, ins in enumerate(plan.instrs) if ins.op == "compute"]
    written = {slot: i for i, ins in enumerate(plan.instrs) for slot in ins.writes}
    shifts = [i for i, ins in enumerate(plan.instrs) if ins.op == "collect" and ins.does.startswith("shift")]
    assert len(shifts) == 12 and {plan.instrs[i].stream for i in shifts} == {"cp"}
    for shift in shifts:
        readers = [i for i, ins in enumerate(plan.instrs) if set(plan.instrs[shift].writes) & set(ins.reads)]
        source = max(written[slot] for slot in plan.instrs[shift].reads)
        between = [i for i in computes if source < i < min(readers)]
        assert between, plan.instrs[shift]


def test_plans_of_rings_are_written_and_read_back() -> None:
    plans = small(1, 2).plans
    text = show_plans(plans)
    assert "shift shift_back" in text and "host_place.CP@0,1@0,1" in text
    assert read_plans(text).plans == plans.plans


def test_an_order_selects_shifts() -> None:
    """Values are shifted before keys where an order says so."""
    first, second = (
        [
            str(ins.run)
            for ins in small(1, 2, *more).plans.of(0).instrs
            if ins.op == "collect" and ins.does == "shift"
        ]
        for more in ((), (order([[at(CP=1, PASS="F")], [at(CP=0, PASS="F")]]),))
    )
    assert first == ["F[PP=0 CP=0]", "F[PP=0 CP=1]"]
    assert second == ["F[PP=0 CP=1]", "F[PP=0 CP=0]"]


def test_a_broken_shift_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = small(1, 2)
    runs = [
        ins.collects.run
        for plan in program.plans
        for ins in plan.instrs
        if ins.op == "collect" and ins.does in ("shift", "shift_back")
    ]
    assert {str(run) for run in runs} == {f"{phase}[PP=0 CP={i}]" for phase in "FB" for i in (0, 1)}
    right = kernels.KERNELS["collect"]

    def broken(at_run: Pass) -> Callable[[Env, Instr], Bound]:
        def bind(env: Env, ins: Instr) -> Bound:
            run, (source, target) = right(env, ins), map(env.at, (ins.reads[0], ins.writes[0]))

            def stays() -> None:
                run()
                if ins.run == at_run:  # a device keeps its own block
                    env.slots[target] = cast(Tensor, env.slots[source]).clone()

            return stays

        return bind

    for run in runs:
        with monkeypatch.context() as patched:
            patched.setitem(cast(dict[str, object], kernels.KERNELS), "collect", broken(run))
            report = check(program, launch_inline, [*program.job.data()])
        assert not report.ok and str(report.first_bad).startswith("step 0: "), report


def test_a_sequence_is_not_divided_again_outside_a_ring() -> None:
    tensor = shard(at(), [0, 1, 2, 3], 2, axis="TP", weights=MODELS["decoder"]().weights, between=1)
    with pytest.raises(ScheduleError, match="a sequence that is sharded already cannot be sharded again"):
        compile(replace(job("decoder", "ring2 inside tp2"), strategy=[ring([0, 1, 2, 3], 2), tensor]))
