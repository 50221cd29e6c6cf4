"""From a job to a proven program, on real models."""

from inspect import cleandoc

import pytest
import torch
from torch import nn

import piper
from piper import at, place, remat, replicate, schedules, shard, split
from piper.directives import Directive
from piper.ir.graph import Graph
from piper.ir.ids import SlotId
from piper.lower.buckets import ProgramBuckets, make_buckets
from tests.zoo import Case, case


def job(case: Case, strategy: list[Directive], rows: int = 8, **changes: object) -> piper.Job:
    fields = {
        "model": case.model,
        "loss": case.loss,
        "data": lambda: [case.batch(rows, 0)],
        "strategy": strategy,
    }
    return piper.Job(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_model_with_skip_edges_compiles_under_a_pipeline_with_zero() -> None:
    model = case("encoder_decoder")  # tests/runtime runs every model
    stages = model.stages
    strategy: list[Directive] = [
        replicate(at(PP=stage), [2 * stage, 2 * stage + 1], zero=3 if stage % 2 else 2)
        for stage in range(stages)
    ]
    strategy += [split(at(), parts=2), *schedules.zero_bubble(stages, 2)]
    program = piper.compile(job(model, strategy))
    assert sorted(d for plan in program.plans for d in plan.devices) == list(range(2 * stages))


def test_experts_compile_with_fewer_ways_than_replicas() -> None:
    model = case("moe")
    strategy: list[Directive] = [
        *(replicate(at(PP=s), range(4 * s, 4 * s + 4), zero=2) for s in range(2)),
        *(shard(at(PP=s, EP="*"), range(4 * s, 4 * s + 4), ways=2) for s in range(2)),
        split(at(), parts=2),
        *schedules.one_f_one_b(2, 2),
    ]
    program = piper.compile(job(model, strategy))
    bucket = next(b for b in program.plans.buckets.values() if len(b.groups) == 2)
    assert bucket.groups == ((0, 2), (1, 3))
    assert {ins.op for plan in program.plans for ins in plan.instrs} >= {
        "counts",
        "exchange",
        "reduce_scatter",
    }


def test_buckets_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer is tried on the buckets that lowering then gets."""
    made: list[ProgramBuckets] = []

    def noted(graph: Graph) -> ProgramBuckets:
        made.append(make_buckets(graph))
        return made[-1]

    monkeypatch.setattr("piper.compiler.build.make_buckets", noted)
    monkeypatch.setattr("piper.lower.lower.make_buckets", noted)
    program = piper.compile(job(case("mlp"), [replicate(at(), [0, 1], zero=2)]))
    assert len(made) == 1 and program.plans.buckets is made[0].read


def test_sets_of_different_sizes_are_captured_once_each() -> None:
    strategy: list[Directive] = [place(at(PP=0), [0, 1]), place(at(PP=1), [2]), split(at(), parts=2)]
    program = piper.compile(job(case("mlp"), strategy))
    assert sorted(program.codes) == [2, 4]
    assert any(ins.op == "concat" for ins in program.plans.of(2).instrs)


def test_explain_names_the_directives_and_the_neighbours() -> None:
    strategy: list[Directive] = [place(at(PP=0), [0]), place(at(PP=1), [1])]
    program = piper.compile(job(case("mlp"), strategy))
    text = program.explain("F[PP=1]")
    assert f"  made by  {strategy[1].title(1)}" in text
    assert "  reads    PP=0.out0@1 from transfer[PP=0.out0 @0 -> @1]" in text
    assert "  in plan  of 1: instruction " in text


def test_explain_says_why_a_forward_runs_again() -> None:
    again = remat(at(PP=0), budget=1, across="PP")
    program = piper.compile(job(case("mlp"), [again, split(at(), parts=2)]))
    text = program.explain("R[PP=0 MB=1]")
    assert "  again    PP=0 keeps only what comes into it" in text
    assert f"  made by  {again.title(0)}" in text


def test_explain_of_an_unknown_node() -> None:
    program = piper.compile(job(case("mlp"), []))
    with pytest.raises(piper.ConfigError) as error:
        program.explain("F[PP=9]")
    assert str(error.value) == cleandoc("""
        explain: there is no node 'F[PP=9]'
          close: F[PP=1], F[PP=0], B[PP=1]
          hint:  `piper plan --device N` lists nodes; BI and BW exist where an order names them
    """)


def test_the_memory_of_bf16_counts_what_rounding_leaves() -> None:
    held = {}
    for precision in ("fp32", "bf16"):
        program = piper.compile(job(case("mlp"), [], precision=precision))
        bucket = next(iter(program.plans.buckets.values()))
        residents = program.plans.of(0).residents
        held[precision] = (
            residents[SlotId("param", bucket.name)].nbytes // bucket.numel,
            residents[SlotId("state", bucket.name)].nbytes // bucket.numel,
        )
    assert held == {"fp32": (4, 8), "bf16": (2, 8 + 2)}


def recipe() -> piper.Job:
    return job(case("mlp"), [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            recipe,
            "compile: recipe is not a Job\n  hint: call the recipe: piper.compile(recipe()); it returns a piper.Job",
        ),
        (
            nn.Linear(1, 1),
            "compile: Linear is not a Job\n"
            "  hint: call the recipe: piper.compile(recipe()); it returns a piper.Job",
        ),
    ],
    ids=["a recipe", "a model"],
)
def test_what_is_no_job(given: object, message: str) -> None:
    with pytest.raises(piper.ConfigError) as refused:
        piper.compile(given)  # type: ignore[arg-type]
    assert str(refused.value) == message


def test_a_job_that_is_not_compiled_cannot_be_launched() -> None:
    with pytest.raises(piper.ConfigError) as refused:
        piper.launch(recipe())  # type: ignore[arg-type]
    assert str(refused.value) == (
        "launch: Job is not a compiled program\n"
        "  hint: compile the job first: piper.launch(piper.compile(job))"
    )


def test_a_loss_that_fails_on_a_slice_alone_names_the_slice() -> None:
    """A batch norm raises on one sample, and not on the whole batch, which the hint says to try."""
    broken = piper.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": torch.ones(4, 4)}],
        strategy=[replicate(at(), [0, 1]), split(at(), parts=2)],
    )
    with pytest.raises(piper.CaptureError) as raised:
        piper.compile(broken)
    assert raised.value.facts["slice"] == "1 of 4 samples, which is what a device computes at a time"
    assert raised.value.facts["batch"] == "x (4, 4)"
