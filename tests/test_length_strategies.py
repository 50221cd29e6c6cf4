"""A job with a strategy for each length of batches: its programs train the same parameters, step by step."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper import at
from piper.check.check import check
from piper.compiler import Program
from piper.directives import Directive
from piper.directives.by_length import ByLength
from piper.directives.json import parse_strategy, show_strategy
from piper.errors import ConfigError, ScheduleError
from piper.job import limit_of
from piper.run.launch import launch_inline

Batch = Mapping[str, Tensor]
DEVICES = range(4)
FIELDS = {"tokens": 1, "labels": 1}
CLIP = 0.7


class Net(nn.Module):
    """A layer with causal attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(13, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("LAYER"):
            x = self.words(tokens)
            q, k, v = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
        with piper.annotate("LAYER"):
            logits: Tensor = self.last(self.norm(x))
            return logits


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return piper.losses.cross_entropy(model(batch["tokens"]), batch["labels"])


def rows(samples: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, 13, (samples, length), generator=rng) for _ in range(2))
    labels[torch.rand(samples, length, generator=rng) < 0.2] = -100
    return {"tokens": tokens, "labels": labels}


def replicas(zero: int) -> list[Directive]:
    return [piper.replicate(at(), DEVICES, zero=zero)]


def context(zero: int, ways: int = 4, **options: Any) -> list[Directive]:  # noqa: ANN401
    return [*replicas(zero), piper.shard(at(), DEVICES, ways=ways, axis="CP", batch=FIELDS, **options)]


SIZES = {"short": (8, 4), "middle": (4, 8), "long": (1, 16)}


def batches(kinds: Sequence[str], steps: int) -> list[dict[str, Tensor]]:
    """Return batches of the named sizes, in turns of several lengths."""
    order = [kinds[7 * step % len(kinds)] for step in range(steps)]
    return [rows(*SIZES[kind], seed) for seed, kind in enumerate(order)]


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def job(data: Sequence[Batch], zero: int = 3, **options: Any) -> piper.Job:  # noqa: ANN401
    strategies = {4: replicas(zero), 16: context(zero, attention="ring", balance="zigzag")}
    given: dict[str, Any] = {"strategy": strategies, "optimizer": adamw, "clip_norm": CLIP, **options}
    return piper.Job(model=Net, loss=loss, data=lambda: data, precision="fp64", steps=len(data), **given)


def plain(
    data: Sequence[Batch], make: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = adamw
) -> tuple[list[float], nn.Module]:
    """Train in plain PyTorch on whole batches, with the same optimizer and clipping."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = make(model.parameters())
    losses: list[float] = []
    for batch in data:
        model.zero_grad()
        total = mean(model, batch)
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(total.item())
    return losses, model


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def compare(program: Program, data: Sequence[Batch], on: str = "inline") -> None:
    """Train on batches that switch between strategies, evaluate, and compare all with plain PyTorch."""
    with piper.launch(program, on=on) as run:
        losses = [run.step(batch).loss for batch in data]
        state = run.state_dict()
        evaluated = [run.evaluate([rows(*size, 99)]).loss for size in ((1, 16), (3, 4), (1, 3))]
    wanted, model = plain(data, program.job.optimizer)
    assert losses == pytest.approx(wanted, abs=1e-9, rel=0)
    for name, value in model.state_dict().items():
        assert (value - state[name]).abs().max() < 1e-9, name
    with torch.no_grad():
        means = [mean(model, rows(*size, 99)).item() for size in ((1, 16), (3, 4), (1, 3))]
    assert evaluated == pytest.approx(means, abs=1e-9, rel=0)


@pytest.fixture(scope="module")
def program() -> Program:
    return piper.compile(job(batches(["short", "long"], 50)))


def test_fifty_steps_that_switch_equal_one_device(program: Program) -> None:
    data = batches(["short", "long", "long"], 50)
    compare(program, data)
    (other,) = program.shapes.values()
    verbs = [[directive.verb for directive in one.graph.directives] for one in (program, other)]
    assert verbs == [["replicate"], ["replicate", "shard"]]
    layouts = [
        {n: (b.pieces, b.groups, b.zero) for n, b in p.plans.buckets.items()} for p in (program, other)
    ]
    assert layouts[0] == layouts[1]  # what workers hold is where the first program has it


def test_a_bucket_is_gathered_and_reduced_once_for_the_pieces_of_a_region(program: Program) -> None:
    """Context parallelism cuts a layer at its collectives, and data parallelism has it whole."""
    program.shaped(rows(*SIZES["long"]))
    (other,) = program.shapes.values()
    (bucket,) = (b for b in other.plans.buckets.values() if any(p.name == "qkv.weight" for p in b.pieces))
    assert len(bucket.chunks) > 1
    for op in ("gather", "reduce_scatter"):
        counts = [
            [ins.bucket for ins in one.plans.of(0).instrs if ins.op == op].count(bucket.name)
            for one in (program, other)
        ]
        assert counts[0] == counts[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("first", ["short", "long"])
def test_three_strategies_equal_one_device_from_any_of_them(zero: int, first: str) -> None:
    strategies = {4: replicas(zero), 8: context(zero, 2), 16: context(zero, attention="ring")}
    data = batches([first, "middle", "long", "short", first], 50)
    compare(piper.compile(job(data, zero, strategy=strategies)), data)


@pytest.mark.slow
def test_processes_switch_too() -> None:
    data = batches(["long", "short", "short"], 50)
    compare(piper.compile(job(data)), data, on="local")


def test_an_uneven_batch_takes_the_slices_of_its_own_strategy(program: Program) -> None:
    """8 samples of each of both strategies are one slice for 4 replicas, and all of it for one group."""
    compare(program, [rows(8, 4, 1), rows(1, 16, 2), rows(3, 4, 3), rows(3, 16, 4), rows(2, 64, 5)])
    with piper.launch(program) as run, pytest.raises(ScheduleError):
        run.step(rows(1, 18))  # positions do not divide


def test_a_run_resumes_bit_for_bit(program: Program, tmp_path: Path) -> None:
    data = batches(["short", "long", "long"], 6)
    with piper.launch(program) as run:
        for batch in data[:2]:
            run.step(batch)
        run.save(tmp_path / "saved")
        wanted = [run.step(batch).loss for batch in data[2:]]
    with piper.launch(program, resume=tmp_path / "saved") as run:
        assert [run.step(batch).loss for batch in data[2:]] == wanted


def test_check_compares_every_strategy() -> None:
    data = batches(["short", "long"], 4)
    report = check(piper.compile(job(data)), launch_inline, data)
    assert report.ok, report


@pytest.mark.parametrize(
    ("strategies", "what"),
    [
        (
            {4: replicas(1), 16: [piper.replicate(at(), range(2), zero=1)]},
            "hold parameters on other devices differently",
        ),
        (
            {4: replicas(0), 16: [*replicas(3), piper.offload(at(), what="optimizer")]},
            "in memory of the host, which cannot move, differently",
        ),
        (
            {4: [*replicas(3), piper.protect(at())], 16: [*replicas(2), piper.protect(at())]},
            "hold the copies of the state of device 0 differently",
        ),
        (
            {4: replicas(0), 16: [*replicas(0), piper.offload(at(), what="optimizer")]},
            "on device 0 differently",
        ),
    ],
)
def test_strategies_that_hold_parameters_differently_are_refused(
    strategies: dict[int, list[Directive]], what: str
) -> None:
    program = piper.compile(job([rows(8, 4)], strategy=strategies))
    with pytest.raises(ScheduleError) as caught:
        program.shaped(rows(4, 16))
    assert "the strategies for two lengths hold" in str(caught.value) and what in str(caught.value)
    assert "up to 4:" in str(caught.value) and "up to 16:" in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        ({}, "the lengths of the strategies are none"),
        ({"4": []}, "the lengths of the strategies are '4'"),
        ({0: []}, "the lengths of the strategies are 0"),
        ({4: [], 8: [piper.at()]}, "strategy[0] is At, not a directive"),
        ({4: "short.json"}, "strategy[0] is str, not a directive"),
    ],
)
def test_malformed_strategies_by_length_are_refused(strategy: Any, what: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError) as caught:
        job([rows(4, 4)], strategy=strategy)
    assert f"): {what}\n" in str(caught.value)


def test_a_strategy_of_devices_and_lengths_is_refused() -> None:
    elastic = job([rows(4, 4)], strategy=lambda devices: {4: [piper.place(at(), devices)]}, elastic=(1, 2))
    with pytest.raises(ConfigError, match="depends on the devices and on the length of the batch"):
        piper.compile(elastic)


def test_the_json_form(tmp_path: Path) -> None:
    both = ByLength(strategies={4: replicas(3), 16: context(3)}, limit=4)
    text = show_strategy(both)
    read = parse_strategy(text)
    assert isinstance(read, ByLength) and list(json.loads(text)) == ["4", "16"]
    assert read.strategies == both.strategies
    (tmp_path / "both.json").write_text(text, encoding="utf-8")
    made = piper.compile(job([rows(1, 16)], strategy=tmp_path / "both.json"))
    assert isinstance(made.job.strategy, ByLength) and made.job.strategy.limit == 16
    with pytest.raises(ConfigError, match="a strategy is a list, not an object"):
        parse_strategy('{"four": []}')
    with pytest.raises(ConfigError, match=r"strategy\['4'\]: a strategy is a list, not a number"):
        parse_strategy('{"4": 3}')


@pytest.mark.parametrize(("length", "limit"), [(1, 4), (4, 4), (5, 16), (16, 16), (17, 16)])
def test_a_batch_takes_the_least_limit_that_it_fits(length: int, limit: int) -> None:
    given = job([rows(2, length)], strategy={4: (), 16: ()})
    assert limit_of(given, rows(2, length)) == limit
    assert limit_of(given, {"x": torch.ones(3)}) == 4
