"""What costs are made of: kernels by themselves, their type and size, and what shares a device with them."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.capture.cost.estimate import pairs_of_tokens
from piper.ir.chunk import Chunk, Kernel, Phase, PhaseSpec, TensorSpec
from piper.ir.devices import Devices
from piper.ir.ids import Pass
from piper.models import decoder
from piper.plan.instr import Instr
from piper.plan.ops import Op
from piper.plan.plan import Comm, Plan, Plans, Slot
from piper.simulate.cluster import Cluster, Link, load_cluster
from piper.simulate.costs import Costs, Roofline, Talk, attention_seconds, product_seconds
from piper.simulate.engine import InstructionCosts, touched, weave
from piper.simulate.measured import Measured, MeasuredOn, prices_of
from piper.simulate.simulate import simulate, simulate_alone
from tests.slots import slot, slots

SMALL = Cluster(
    name="small",
    links=(Link(name="wire", bandwidth=10.0, latency=0.5, slows=0.25),),
    flops={"float32": 10.0, "bfloat16": 100.0},
    memory=1000.0,
    memory_bandwidth=20.0,
    attained=0.5,
    attained_attention=0.25,
    attained_memory=1.0,
    launch=1.0,
    kernel=0.125,
    context=100.0,
    communicator=50.0,
    fragmentation=0.1,
)


def chunk_of(*kernels: Kernel, dtype: str = "float32") -> Chunk:
    spec = PhaseSpec(kernels=kernels)
    out = TensorSpec(shape=(1,), dtype=dtype, nbytes=4)
    return Chunk(name="PP=0", tags=(("PP", 0),), key="k", outputs=(out,), phases={"F": spec})


def test_products_in_fp8_have_their_own_speed() -> None:
    forward = Kernel(kind="product", dtype="float8_e4m3fn", flops=100, nbytes=20)
    gradient = replace(forward, dtype="float8_e5m2")
    cast = Kernel(kind="traffic", dtype="float8_e4m3fn", nbytes=20)
    fast = replace(SMALL, flops={**SMALL.flops, "float8_e4m3fn": 100.0})
    assert Roofline(fast).kernel(forward) == Roofline(fast).kernel(gradient) == 0.125 + 2
    assert Roofline(SMALL).kernel(cast) == 0.125 + 1
    emulated = replace(SMALL, cores=2)
    assert Roofline(emulated).kernel(forward) == 0.125 + 20  # as float32
    with pytest.raises(piper.ConfigError) as caught:
        Roofline(SMALL).kernel(forward)
    assert str(caught.value) == (
        "--cluster: the devices of small have no products in fp8\n"
        "  flops: float32, bfloat16\n"
        "  hint:  leave precision out of the strategy, or give float8_e4m3fn in [flops] of its file"
    )
    speeds = {name: load_cluster(name).flops.get("float8_e4m3fn") for name in ("h100", "h200", "a100")}
    assert speeds == {"h100": 1979e12, "h200": 1979e12, "a100": None}


def test_copies_between_device_and_host_take_the_time_of_their_link() -> None:
    linked = replace(SMALL, host_bandwidth=50.0, launch=0.5)
    assert Roofline(linked).touch("offload", 100) == Roofline(linked).touch("fetch", 100) == 2.5
    assert Roofline(replace(SMALL, cores=2)).touch("offload", 100) == 1.125 + 5  # both have the same memory
    with pytest.raises(piper.ConfigError) as caught:
        Roofline(SMALL).touch("offload", 100)
    assert str(caught.value) == (
        "--cluster: the devices of small have no memory of a host to offload to\n"
        "  missing: host_bandwidth\n"
        "  hint:    give host_bandwidth in its file, in bytes per second, or leave offload out"
    )


def test_copies_one_way_share_the_link_and_those_the_other_way_do_not() -> None:
    def copies(*ops: Op) -> float:
        instrs = tuple(Instr(op=op, node=f"{op} {i}", stream=f"{i}", nbytes=100) for i, op in enumerate(ops))
        plan = Plan(devices=(0,), instrs=instrs, slots={}, residents={})
        plans = Plans(plans=(plan,), comms={}, buckets={}, seed=1.0, weighted=False)
        return simulate(plans, None, Roofline(replace(SMALL, host_bandwidth=50.0, launch=0.0))).step

    assert copies("offload") == copies("offload", "fetch") == 2.0
    assert copies("offload", "offload") == copies("offload", "protect", "fetch") == 4.0


def test_each_kernel_has_its_own_roofline() -> None:
    """One is bound by arithmetic (100 / 50 = 2 s), one by memory (60 / 20 = 3 s): 5 s, not 3 s of the sums."""
    product = Kernel(kind="product", dtype="bfloat16", flops=100, nbytes=20)
    norm = Kernel(kind="traffic", dtype="bfloat16", nbytes=60)
    assert Roofline(SMALL).compute(chunk_of(product, norm), "F") == 1 + 2 * 0.125 + 2 + 3


def test_equal_kernels_are_counted() -> None:
    product = Kernel(kind="product", dtype="bfloat16", flops=100, nbytes=20, count=3)
    assert Roofline(SMALL).compute(chunk_of(product), "F") == 1 + 3 * (0.125 + 2)


def test_a_product_counts_with_its_own_type_and_not_with_that_of_the_output() -> None:
    """The last stage computes in bf16 and returns a loss in fp32."""
    product = Kernel(kind="product", dtype="bfloat16", flops=100)
    assert Roofline(SMALL).compute(chunk_of(product, dtype="float32"), "F") == 1 + 0.125 + 2


def test_attention_attains_less_than_products() -> None:
    attention = Kernel(kind="attention", dtype="bfloat16", flops=100)
    assert Roofline(SMALL).compute(chunk_of(attention), "F") == 1 + 0.125 + 4


def test_the_host_must_issue_each_kernel() -> None:
    tiny = Kernel(kind="traffic", dtype="float32", count=10)
    quick = Roofline(SMALL).compute(chunk_of(tiny), "F")
    assert quick == 1 + 10 * 0.125
    assert Roofline(replace(SMALL, issue=0.5)).compute(chunk_of(tiny), "F") == 1 + 10 * 0.5


def test_causal_attention_looks_at_earlier_tokens_only() -> None:
    assert pairs_of_tokens(4, 4, causal=True) == 1 + 2 + 3 + 4
    assert pairs_of_tokens(2, 4, causal=True) == 1 + 2
    assert pairs_of_tokens(4, 2, causal=True) == 1 + 2 + 2 + 2
    assert pairs_of_tokens(4, 2, causal=False) == 8


# Measured on an H200 with benchmarks/gpu_costs.py: rows, columns, depth, microseconds.
PRODUCTS = [
    (2048, 4096, 4096, 99.9),
    (8192, 4096, 4096, 395.6),
    (1024, 12288, 4096, 152.2),
    (8192, 12288, 4096, 1236.9),
    (8192, 4096, 12288, 1181.6),
    (4096, 4096, 1024, 57.4),
    (12288, 4096, 1024, 160.1),
    (8192, 1024, 4096, 98.6),
    (2048, 2048, 2048, 25.4),
    (2048, 6144, 2048, 80.4),
    (2048, 2304, 16384, 212.4),
    (8192, 13312, 16384, 5067.0),
    (8192, 16384, 6656, 2642.7),
    (16384, 16384, 16384, 13053.3),
    (2048, 3072, 12288, 236.8),
    (2048, 12288, 1536, 120.6),
    (1024, 151936, 4096, 1898.2),
]


@pytest.mark.parametrize(("rows", "columns", "depth", "measured"), PRODUCTS)
def test_products_by_size(rows: int, columns: int, depth: int, measured: float) -> None:
    flops = 2 * rows * columns * depth
    kernel = Kernel(kind="product", dtype="bfloat16", flops=flops, shape=(1, rows, columns, depth))
    assert Roofline(load_cluster("h200")).kernel(kernel) * 1e6 == pytest.approx(measured, rel=0.12)


def test_a_small_product_leaves_processors_idle() -> None:
    """One tile of 64 x 64 on one of 100 processors, at 0.55 of the speed of large tiles."""
    flops = 2 * 64 * 64 * 900
    assert product_seconds(flops, (1, 64, 64, 900), 1e6, 100) == pytest.approx(
        flops * 1000 / 900 / 0.55 / 1e4
    )
    assert product_seconds(flops, (1, 64, 64, 900), 1e6, 0) == flops / 1e6
    assert product_seconds(flops, (), 1e6, 100) == flops / 1e6


def test_short_attention_is_less_efficient() -> None:
    assert attention_seconds(100.0, (8, 550, 550, 64), 10.0, 132) == 20.0
    assert attention_seconds(100.0, (8, 550, 550, 64), 10.0, 0) == 10.0


# Measured on an H200: heads of all samples, tokens, microseconds of a causal forward and of a backward.
ATTENTIONS = [(128, 1024, 84.7, 296.0), (256, 1024, 163.7, 555.0), (16, 8192, 531.4, 1470.5)]


@pytest.mark.parametrize(("heads", "length", "forward", "backward"), ATTENTIONS)
def test_attention_forward_and_backward(heads: int, length: int, forward: float, backward: float) -> None:
    whole = 4 * heads * 128 * length * (length + 1) // 2
    shape = (heads, length, length, 128)
    roofline = Roofline(load_cluster("h200"))
    both = sum(
        roofline.kernel(Kernel(kind="attention", dtype="bfloat16", flops=flops, shape=shape))
        for flops in (whole, whole * 5 // 2)
    )
    assert both * 1e6 == pytest.approx(forward + backward, rel=0.12)


class Talking:
    """Communication takes 4 s and a quarter of its members' speed, computing 6 s."""

    cores, node, period, wake = 0, 8, 1, 0.0

    def __init__(self, slows: float) -> None:
        self.slows = slows

    def compute(self, chunk: Chunk | None, phase: Phase) -> float:
        return 6.0

    def touch(self, op: Op, nbytes: int) -> float:
        return 0.0

    def talk(self, op: Op, nbytes: int, devices: Devices) -> Talk:
        return Talk(seconds=4.0, slows=self.slows)


@pytest.mark.parametrize(("slows", "step"), [(0.0, 6.0), (0.25, 7.0), (0.5, 8.0)])
def test_computing_is_slower_while_a_communication_is_under_way(slows: float, step: float) -> None:
    """For 4 s computing has 0.75 of its speed and does the work of 3 s; the other 3 s come after."""
    instrs = (
        Instr(op="compute", node="F", stream="compute", payload=Pass(phase="F", chunk="PP=0")),
        Instr(op="all_reduce", node="r", stream="reduce", comm="c", nbytes=8),
    )
    plan = Plan(devices=(0, 1), instrs=instrs, slots={}, residents={})
    comms = {"c": Comm(name="c", kind="groups", groups=((0, 1),))}
    plans = Plans(plans=(plan,), comms=comms, buckets={}, seed=1.0, weighted=False)
    costs: Costs = Talking(slows)
    found = simulate(plans, None, costs)
    assert found.step == step
    assert found.timelines[0].spans[1].end == 4.0


def test_a_reduction_of_shards_lays_gradients_in_one_buffer_first() -> None:
    """Two members send 40 bytes each of 80: 4 s on the wire. The copy of 160 bytes takes 8 s, so computing
    has a tenth of its speed, which is the least."""
    talk = Roofline(SMALL).talk("reduce_scatter", 40, (0, 1))
    assert (talk.seconds, talk.slows) == (4.0, 0.9)
    quick = Roofline(replace(SMALL, memory_bandwidth=400.0)).talk("reduce_scatter", 40, (0, 1))
    assert quick.slows == pytest.approx(0.25 + 160 / 400 / 4)
    assert Roofline(SMALL).talk("all_reduce", 40, (0, 1)).slows == 0.25


@pytest.mark.parametrize(("cores", "read", "latency"), [(2, "g", 14.625), (2, "grad", 1.5), (0, "g", 1.5)])
def test_on_a_host_gradients_that_lie_apart_are_copied_before_they_are_reduced(
    cores: int, read: str, latency: float
) -> None:
    """120 bytes are read and written: 1 s and 0.125 s to begin, 12 s at 20 bytes/s. A sum is one buffer."""
    source = slot(f"PP=0/0.{read}")
    instr = Instr(op="reduce_scatter", node="r", stream="reduce", comm="c", nbytes=60, reads=(source,))
    plan = Plan(devices=(0, 1), instrs=(instr,), slots={source: Slot(nbytes=120)}, residents={})
    comms = {"c": Comm(name="c", kind="groups", groups=((0, 1),))}
    plans = Plans(plans=(plan,), comms=comms, buckets={}, seed=1.0, weighted=False)
    talk = InstructionCosts(weave(plans), {}, Roofline(replace(SMALL, cores=cores))).talk(0)
    assert (talk.latency, talk.seconds) == (latency, 6.0)


def test_a_backward_that_adds_to_a_sum_reads_it_as_well() -> None:
    """120 bytes at 20 bytes/s: 6 s more than the backward that begins the sum, and no kernel more."""
    total = slot("PP=0/0.grad")
    run = Pass(phase="B", chunk="PP=0")
    first = Instr(op="compute", node="a", stream="compute", payload=run, writes=(total,))
    later = replace(first, reads=(total,))
    plan = Plan(devices=(0,), instrs=(first, later), slots={total: Slot(nbytes=120)}, residents={})
    plans = Plans(plans=(plan,), comms={}, buckets={}, seed=1.0, weighted=False)
    chunk = replace(chunk_of(), phases={"B": PhaseSpec(flops=10)})
    costs = InstructionCosts(weave(plans), {"PP=0": chunk}, Roofline(SMALL))
    assert costs.seconds(1) - costs.seconds(0) == 6.0
    assert MEASURED.touch("compute", 120) == 0.0  # measured times hold it


MEASURED = Measured(
    model="m", source="costs.json", chunks={"k": {"F": 5.0}}, arithmetic=0.0, traffic=0.0, gap=1.0, wake=0.25
)


def test_measured_computing_on_the_links_of_a_cluster() -> None:
    both = MeasuredOn(MEASURED, SMALL)
    assert both.compute(chunk_of(), "F") == 6.0
    assert both.talk("send", 20, (0, 1)) == Talk(latency=1.5, seconds=2.0, level=0, slows=0.25)
    assert (both.cores, both.node, both.wake) == (0, 8, 0.25)


def test_costs_and_a_cluster_together(tmp_path: Path) -> None:
    from piper.simulate.measured import write_costs

    path = tmp_path / "costs.json"
    write_costs(MEASURED, path)
    alone, both = prices_of(None, path), prices_of("a100", path)
    assert isinstance(alone.costs, Measured) and alone.cluster is None
    assert isinstance(both.costs, MeasuredOn)
    assert both.name == f"{path} with the links of a100"
    assert both.cluster == load_cluster("a100")
    assert prices_of(None, None).name == "h100"
    assert prices_of(None, None, default="cpu").name == "cpu"


def test_memory_that_a_plan_may_not_use() -> None:
    """1000 bytes, less 100 for the context and 50 for each of two communicators; of 800 a tenth is lost."""
    assert SMALL.usable(2) == pytest.approx(720.0)
    assert SMALL.usable(100) == 0.0


def test_an_update_reads_and_writes_the_state_of_the_optimizer() -> None:
    ins = Instr(op="update", node="u", stream="compute", reads=slots("a/0.grad"), writes=slots("a/0.param"))
    assert ins.writes[0].kind == "param"
    residents = {slot("a/0.param"): Slot(nbytes=4), slot("a/0.state"): Slot(nbytes=16)}
    residents[slot("b/0.state")] = Slot(nbytes=1000)
    plan = Plan(devices=(0,), instrs=(ins,), slots={slot("a/0.grad"): Slot(nbytes=2)}, residents=residents)
    assert touched(plan, ins) == 2 + 4 + 2 * 16


class Mixed(nn.Module):
    """A product in bf16 whose loss is in fp32, after an attention and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.rms_norm(x @ self.weight, (16,))
        heads = x.view(x.shape[0], 8, 2, 8).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def mixed_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    made: Tensor = model(batch["x"].bfloat16())
    return made.float().square().mean()


def kernels_of(*, compiled: bool) -> Sequence[Kernel]:
    job = piper.Job(
        model=Mixed,
        loss=mixed_loss,
        data=lambda: [{"x": torch.ones(2, 8, 16)}],
        strategy=[piper.place(piper.at(), [0])],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        precision="bf16",
    )
    return piper.compile(job, device="cpu", compile=compiled).outline.chunks[0].phases["F"].kernels


def test_capture_lists_kernels_with_their_types() -> None:
    found = kernels_of(compiled=False)
    products = [kernel for kernel in found if kernel.kind == "product"]
    assert [(k.dtype, k.flops, k.shape) for k in products] == [
        ("bfloat16", 2 * 16 * 16 * 16, (1, 16, 16, 16))
    ]
    (attention,) = (kernel for kernel in found if kernel.kind == "attention")
    assert (attention.dtype, attention.shape) == ("bfloat16", (4, 8, 8, 8))
    assert attention.flops == 2 * 2 * (2 * 2) * 8 * (8 * 9 // 2)  # causal: 36 of 64 pairs
    assert products[0].nbytes == 2 * (16 * 16 + 16 * 16 + 16 * 16)


def test_a_compiler_fuses_what_only_moves_memory() -> None:
    """A norm and a loss are one kernel each; without a compiler each of their operations is one."""
    plain, fused = kernels_of(compiled=False), kernels_of(compiled=True)
    count = {name: sum(k.count for k in found if k.kind == "traffic") for name, found in
             (("plain", plain), ("fused", fused))}  # fmt: skip
    assert count["fused"] <= 3 < 6 <= count["plain"]
    moved = [sum(k.count * k.nbytes for k in found if k.kind == "traffic") for found in (plain, fused)]
    assert moved[1] < 0.7 * moved[0]


# One stage of a 36-layer decoder under PP8 x DP4 and ZeRO 3, 16 microbatches: ms of a step on an H200.
STAGE = {1: 183, 4: 563, 8: 1070}
WIDE = decoder.Config(
    vocab=256, dim=4096, layers=12, heads=32, kv_heads=8, head_dim=128, hidden=12_288, qk_norm=True, stages=3,
    by_layer=True,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "measured"), STAGE.items())
def test_a_stage_as_an_h200_runs_it(samples: int, measured: float) -> None:
    tokens = torch.zeros((4 * 16 * samples, 1024), dtype=torch.long)
    places = [piper.replicate(piper.at(PP=s), devices=range(4 * s, 4 * s + 4), zero=3) for s in range(3)]
    job = piper.Job(
        model=lambda: decoder.Decoder(WIDE),
        loss=decoder.token_loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        strategy=[
            *places,
            piper.split(piper.at(), parts=16),
            *piper.schedules.one_f_one_b(stages=3, microbatches=16),
        ],
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        precision="bf16",
    )
    program = piper.compile(job, device="cpu", compile=True)
    found = simulate_alone(program.plans, program.outline, Roofline(load_cluster("h200")), 4)
    assert found.step * 1e3 == pytest.approx(measured, rel=0.1)


def test_the_simulator_needs_no_torch() -> None:
    modules = "piper.simulate.simulate, piper.simulate.measured, piper.cli.simulate"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_attention_of_a_divided_sequence_counts_the_pairs_of_one_device() -> None:
    """Of eight tokens over two devices, one has the first and last two: 1 + 2 + 7 + 8 of 36 pairs."""
    from torch.utils.flop_counter import flop_registry

    from piper.capture.shard.attention_operators import all_keys

    count = flop_registry[torch.ops.piper.ring_attend]
    own, keys, turn = torch.Size((1, 1, 4, 8)), torch.Size((1, 1, 8, 8)), all_keys(2, True).numbers
    assert count(own, keys, keys, None, [], torch.Size(()), 1.0, turn, out_val=None) == 2 * 18 * (8 + 8)
