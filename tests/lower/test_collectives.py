"""Collectives inside divided regions are nodes: they can be ordered, priced, drawn, written down and read back."""

from dataclasses import replace
from functools import cache
from inspect import cleandoc

import pytest
import torch
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate
from piper.check.check import check
from piper.cli.plan import bytes_by_kind
from piper.compiler import Program, compile
from piper.directives import Directive, order, shard, split
from piper.directives.json import parse_strategy
from piper.errors import ConfigError, ScheduleError
from piper.ir.ids import Pass
from piper.ir.select import at
from piper.ir.sharding import Collective, Shard
from piper.job import Job
from piper.plan.instr import Instr
from piper.plan.ops import Collecting
from piper.plan.text import read_plans, show_plans
from piper.run.launch import launch_inline
from piper.simulate.cluster import load_cluster

WEIGHTS = {"*.up": 0, "*.down": 1}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with annotate("LAYER"):
                x = block(x)
        return x


def job(*more: Directive, between: int | None = None) -> Job:
    x = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(0))
    return Job(
        model=Net,
        loss=lambda model, batch: model(batch["x"]).pow(2).mean(),
        data=lambda: [{"x": x}],
        strategy=[
            shard(at(), [0, 1], axis="TP", weights=WEIGHTS, between=between),
            split(at(), axis="MB", parts=2),
            *more,
        ],
        precision="fp64",
    )


@cache
def plain(between: int | None = None) -> Program:
    return compile(job(between=between), device="cpu")


def issued(program: Program) -> list[str]:
    return [str(ins.run) for ins in program.plans.of(0).instrs if ins.op in ("compute", "collect")]


def test_an_order_selects_collectives() -> None:
    """The second microbatch's sum is taken first, where an order says so."""
    made = job(order([[at(TP=0, MB=1, PASS="F")], [at(TP=0, MB=0, PASS="F")]]))
    program = compile(made, device="cpu")
    runs, before = issued(program), issued(plain())
    assert runs.index("F[LAYER=0 TP=0 MB=1]") < runs.index("F[LAYER=0 TP=0 MB=0]")
    assert before.index("F[LAYER=0 TP=0 MB=0]") < before.index("F[LAYER=0 TP=0 MB=1]")
    assert check(program, launch_inline, [*made.data()]).ok
    with pytest.raises(ScheduleError, match="there is no tag 'CP'"):
        compile(job(order([[at(CP=0)], [at(CP=1)]])), device="cpu")


def test_plans_with_collectives_are_written_and_read_back() -> None:
    for between in (None, 1):
        program = plain(between)
        assert read_plans(show_plans(program.plans)) == replace(program.plans, why=())


def test_bytes_are_counted_by_the_kind_of_collective() -> None:
    """A microbatch is 2 x 4 x 8 numbers of 8 bytes: 512 bytes.

    Per microbatch there are three sums: of both layers forward, and of the second backward. For a sum each of
    two devices sends as many bytes as it holds, for a gather or a scatter half as many.
    """
    assert bytes_by_kind(plain()) == {"all_reduce": 3 * 2 * 2 * 512, "total": 48}
    assert bytes_by_kind(plain(1)) == {
        "all_gather": 3 * 2 * 2 * 256,
        "reduce_scatter": 3 * 2 * 2 * 256,
        "all_reduce": 2 * 2 * 8,  # of the loss
        "total": 48,
    }


def test_a_collective_travels_as_what_it_is() -> None:
    how = Collective(axis="TP", degree=2, op="all_gather", back="reduce_scatter", joined=Shard(dim=1))
    ops: dict[str, str] = {}
    for op in ("all_gather", "reduce_scatter", "all_reduce", "max", "all_to_all", "shift", "shift_back"):
        payload = Collecting(run=Pass(phase="F", chunk="TP=0"), how=replace(how, op=op))
        ops[op] = Instr(op="collect", node="F[TP=0]", stream="tp", payload=payload).travels_as
    assert ops == {
        "all_gather": "gather",
        "reduce_scatter": "reduce_scatter",
        "all_reduce": "all_reduce",
        "max": "all_reduce",
        "all_to_all": "exchange",
        "shift": "shift",
        "shift_back": "shift",
    }


def test_a_sum_takes_twice_the_rounds_of_a_gather_on_a_cluster() -> None:
    program = plain()
    cluster = load_cluster("h100")
    sums = [ins for ins in program.plans.of(0).instrs if ins.op == "collect"]
    assert {ins.travels_as for ins in sums} == {"all_reduce"}
    latency = cluster.latency(sums[0].travels_as, (0, 1))
    assert latency == 2 * cluster.latency("gather", (0, 1)) == 2 * cluster.links[0].latency


JSON = """[
  {"op": "shard", "filter": {}, "devices": [0, 1], "axis": "TP", "weights": {"*.up": 0, "*.down": 1}, "between": 1},
  {"op": "shard", "filter": {}, "devices": [0, 1, 2, 3], "ways": 2, "axis": "CP", "batch": {"x": 1},
   "attention": "heads", "balance": "zigzag", "stream": "ring"}
]"""


def test_the_json_form_of_a_division() -> None:
    assert parse_strategy(JSON) == [
        shard(at(), [0, 1], axis="TP", weights=WEIGHTS, between=1),
        shard(at(), [0, 1, 2, 3], 2, "ring", axis="CP", batch={"x": 1}, attention="heads", balance="zigzag"),
    ]


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            '{"op": "shard", "filter": {}, "devices": [0], "axis": "TP", "weights": {"up": -1}}',
            """
            strategy[0]: 'weights' is {"up": -1}
              hint: 'weights' is an object of names, each with a dimension from 0
            """,
        ),
        (
            '{"op": "shard", "filter": {}, "devices": [0], "axis": "TP", "weight": {"up": 1}}',
            """
            strategy[0]: shard has no key 'weight'
              known: filter, devices, axis, ways, weights, batch, between, attention, balance, stream
              hint:  did you mean 'weights'?
            """,
        ),
    ],
)
def test_json_that_is_wrong(entry: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_strategy(f"[{entry}]")
    assert str(caught.value) == cleandoc(text)


class NormedNet(nn.Module):
    """Norms between layers that are sharded: under sequence parallelism their gradients are partial sums."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            with annotate("LAYER"):
                x = block(norm(x))
        return x


@pytest.mark.parametrize("joined", [True, False])
def test_partial_gradients_of_small_parameters_are_reduced_at_once(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not joined:
        monkeypatch.setattr("piper.lower.buckets.SMALL", 0)
    strategy = [
        shard(at(), [0, 1], axis="TP", weights=WEIGHTS, between=1),
        split(at(), parts=2),
    ]
    program = compile(replace(job(), model=NormedNet, strategy=strategy, precision="fp64"))
    reduced = [ins for ins in program.plans.of(0).instrs if ins.op == "all_reduce"]
    assert len(reduced) == (1 if joined else 2)  # the first norm reads all of the batch
    total = next(ins for ins in program.plans.of(0).instrs if ins.op == "total")
    assert {ins.comm for ins in (*reduced, total)} == {"0,1:tp" if joined else "0,1:reduce"}
    assert list(program.plans.comms) == (["0,1:tp"] if joined else ["0,1:tp", "0,1:reduce"])
    assert sum(ins.nbytes for ins in reduced) == 2 * 2 * 8 * 8  # the weight and the bias of each
    torch.manual_seed(program.job.seed)
    model = NormedNet().double()
    optimizer = program.job.optimizer([*model.parameters()])
    batch = next(iter(program.job.data()))
    with launch_inline(program) as run:
        model.load_state_dict(run.state_dict())
        for _ in range(3):
            result = run.step(batch)
            optimizer.zero_grad()
            loss = model(batch["x"].double()).pow(2).mean()
            loss.backward()
            optimizer.step()
            assert result.loss == pytest.approx(loss.item(), rel=1e-12)
        for name, value in run.state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-9, atol=1e-12)
