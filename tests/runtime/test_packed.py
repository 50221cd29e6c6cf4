"""Packed documents give the numbers of one device, and those of each document by itself."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from piper.capture.trace.annotate import annotate_modules
from piper.check.reference import Exact
from piper.compiler import compile
from piper.data import balance_documents
from piper.directives import Directive, place, replicate, shard, split
from piper.errors import CaptureError
from piper.ir.select import at
from piper.job import Job
from piper.losses import cross_entropy
from piper.models.huggingface import tensor_plan
from piper.run.launch import launch_inline
from piper.schedules import one_f_one_b
from piper.workers.results import StepResult
from tests.runtime.divided import checked
from tests.runtime.packed import FIELDS, PACKINGS, WEIGHTS, Packed, batch, by_document, loss
from tests.runtime.sharing import Shared

Strategy = Callable[[], list[Directive]]


def context(
    ways: int, attention: str, balance: str | None = None, fields: Iterable[str] = FIELDS
) -> list[Directive]:
    """Shard the sequence over a group."""
    sharded = dict.fromkeys(fields, 1)
    return [shard(at(), range(ways), axis="CP", batch=sharded, attention=attention, balance=balance)]


def tensor(between: int | None = None) -> list[Directive]:
    """Shard the weights over two devices."""
    return [shard(at(), [0, 1], axis="TP", weights=WEIGHTS, between=between)]


def both(attention: str) -> list[Directive]:
    """Shard weights and the sequence, each over pairs of four devices."""
    devices = range(4)
    return [
        shard(at(), devices, 2, axis="TP", weights=WEIGHTS),
        shard(at(), devices, 2, axis="CP", batch=FIELDS, attention=attention, balance="zigzag"),
    ]


def stages() -> list[Directive]:
    """Put each stage on a device of its own: the mask is made on the first."""
    homes = [place(at(PP=stage), [stage]) for stage in (0, 1)]
    return [*homes, split(at(), axis="MB", parts=2), *one_f_one_b(2, 2)]


STRATEGIES: Mapping[str, Strategy] = {
    "zero": lambda: [replicate(at(), [0, 1], zero=3)],
    "1f1b": stages,
    "tp": tensor,
    "sp": partial(tensor, 1),
    "gather": partial(context, 2, "gather"),
    "gather zigzag": partial(context, 2, "gather", "zigzag"),
    "gather4 zigzag": partial(context, 4, "gather", "zigzag"),  # slices of two, blocks of four
    "heads": partial(context, 2, "heads"),
    "ring": partial(context, 2, "ring"),
    "ring zigzag": partial(context, 2, "ring", "zigzag"),
    "ring4 zigzag": partial(context, 4, "ring", "zigzag"),
    "tp gather": partial(both, "gather"),
    "tp ring": partial(both, "ring"),
}
ALWAYS = [
    ("flex", "several", "1f1b"),
    ("flex", "several", "tp gather"),
    ("flex", "several", "ring zigzag"),
]
REST = [
    (kind, packing, strategy)
    for kind in ("flex", "sdpa", "alibi", "softcap", "starts")
    for packing in PACKINGS
    for strategy in STRATEGIES
    if (kind, packing, strategy) not in ALWAYS
    and (packing == "several" or (kind == "flex" and strategy in ("1f1b", "sp", "gather", "ring zigzag")))
    and not (kind in ("alibi", "softcap") and "ring" in strategy)
] + [("varlen", "several", strategy) for strategy in ("zero", "1f1b", "tp", "sp", "gather", "heads")]


@cache
def builder(kind: str, packing: str) -> Callable[[], nn.Module]:
    """Return what builds a model, one object for each model and batch: they share a capture."""
    block = 5 if packing == "whole" else 4  # 5 does not divide the sequence
    return lambda: Packed(kind, block=block)


def job(kind: str, packing: str, strategy: str) -> Job:
    """Return the job of a model under a strategy, in fp64."""
    fields = batch(PACKINGS[packing])
    return Job(
        model=builder(kind, packing),
        loss=loss,
        data=lambda: [fields],
        strategy=STRATEGIES[strategy](),
        precision="fp64",
        clip_norm=1.0,
    )


@pytest.fixture(scope="module")
def shared() -> Shared:
    """Share captures between tests."""
    return Shared()


@pytest.mark.parametrize(("kind", "packing", "strategy"), ALWAYS)
def test_packed_documents_have_the_numbers_of_one_device(
    shared: Shared, kind: str, packing: str, strategy: str
) -> None:
    report = checked(job(kind, packing, strategy), shared)
    assert report.ok, report
    assert report.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "packing", "strategy"), REST)
def test_every_packing_under_every_strategy(shared: Shared, kind: str, packing: str, strategy: str) -> None:
    report = checked(job(kind, packing, strategy), shared)
    assert report.ok, report


@pytest.mark.parametrize(
    ("kind", "packing", "strategy"),
    [
        ("flex", "several", "ring zigzag"),
        ("varlen", "several", "gather zigzag"),
        *(
            pytest.param(kind, packing, strategy, marks=pytest.mark.slow)
            for kind, packing, strategy in (
                ("alibi", "single tokens", "1f1b"),
                ("softcap", "several", "gather4 zigzag"),
                ("sdpa", "several", "ring"),
                ("varlen", "several", "tp"),
                ("varlen", "single tokens", "heads"),
                ("flex", "whole", "tp"),
            )
        ),
    ],
)
def test_a_step_is_that_of_each_document_by_itself(
    shared: Shared, kind: str, packing: str, strategy: str
) -> None:
    with shared.capturing():
        program = compile(job(kind, packing, strategy), device="cpu")
    fields, model = batch(PACKINGS[packing]), Packed(kind).double()
    with launch_inline(program) as run:
        model.load_state_dict(run.state_dict(), strict=False)
        result = run.step(fields)
    agree(result, model, by_document(model, fields, PACKINGS[packing]))


@pytest.mark.parametrize("attention", ["gather", pytest.param("ring", marks=pytest.mark.slow)])
def test_a_batch_that_is_balanced_by_work_gives_the_same_step(attention: str) -> None:
    """Four devices get pieces of two tokens, whose documents cross the cuts."""
    fields, model = batch(PACKINGS["several"]), Packed("placed").double()
    del fields["places"]
    balanced = balance_documents(fields, ways=4, piece=2)
    assert not torch.equal(balanced["tokens"], fields["tokens"])
    made = replace(
        job("placed", "several", "gather"), data=lambda: [balanced], strategy=context(4, attention)
    )
    with launch_inline(compile(made, device="cpu")) as run:
        model.load_state_dict(run.state_dict(), strict=False)
        result = run.step(balanced)
    agree(result, model, by_document(model, fields, PACKINGS["several"]))


def agree(result: StepResult, model: nn.Module, wanted: Tensor) -> None:
    """Compare a step with a loss in plain PyTorch and the norm of its gradient."""
    wanted.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert result.loss == pytest.approx(wanted.item(), rel=1e-12)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-9)


SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def stock(family: str, attention: str) -> nn.Module:
    """Build an unmodified model of `transformers`. Mistral has a window that is shorter than a document."""
    more = {"sliding_window": 6} if family == "Mistral" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES, **HEADS, **more, attn_implementation=attention)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return annotate_modules(model, {"PP": [["model.layers.0"], ["model.layers.1"]]})


def stock_loss(model: nn.Module, fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of a stock model, which finds its documents by their positions."""
    output = model(input_ids=fields["tokens"], position_ids=fields["positions"], use_cache=False)
    return cross_entropy(output.logits, fields["labels"])


def stages_of_two() -> list[Directive]:
    """Shard the sequence of each stage over two devices of its own."""
    fields = dict.fromkeys(("tokens", "labels", "positions"), 1)
    return [shard(at(PP=i), [2 * i, 2 * i + 1], axis="CP", batch=fields) for i in (0, 1)]


STOCK: Mapping[str, Strategy] = {
    "gather 1f1b": lambda: [*stages_of_two(), split(at(), axis="MB", parts=2), *one_f_one_b(2, 2)],
    "sp": lambda: [
        shard(at(), [0, 1], axis="TP", weights=tensor_plan(transformers.LlamaConfig()), between=1)
    ],
    "gather": partial(context, 2, "gather", fields=("tokens", "labels", "positions")),
    "ring zigzag": partial(context, 2, "ring", "zigzag", fields=("tokens", "labels", "positions")),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3"])
@pytest.mark.parametrize("strategy", STOCK)
def test_a_stock_model_attends_within_documents(shared: Shared, family: str, strategy: str) -> None:
    """A model of `transformers` with flex_attention has the numbers of each document by itself."""
    packing = PACKINGS["several"]
    fields = {name: batch(packing)[name] for name in ("tokens", "labels", "positions")}
    made = Job(
        model=partial(stock, family, "flex_attention"),
        loss=stock_loss,
        data=lambda: [fields],
        strategy=STOCK[strategy](),
        precision="fp64",
        clip_norm=1.0,
    )
    model = stock(family, "sdpa").double()
    with launch_inline(compile(made, device="cpu")) as run:
        model.load_state_dict(run.state_dict(), strict=False)
        result = run.step(fields)
    totals = torch.zeros(2, dtype=torch.float64)
    for row, sizes in enumerate(packing):
        for own in torch.arange(16).split(list(sizes)):
            alone = {name: field[row : row + 1, own] for name, field in fields.items()}
            with Exact():  # sharded models cast nothing down
                total, count = stock_loss(model, alone)
            totals = totals + torch.stack([total, count.double()])
    agree(result, model, totals[0] / totals[1])


def seen_by(documents: Tensor, rows: Tensor) -> Tensor:
    """Return which keys some queries of a row of documents see."""
    places = torch.arange(len(documents))
    return (documents[rows][:, None] == documents) & (rows[:, None] >= places)


@pytest.mark.parametrize("rows", [range(8, 16), [*range(4), *range(12, 16)], [0, 1, 6, 7, 8, 9, 14, 15]])
def test_blocks_of_some_queries_hold_what_these_see(rows: list[int]) -> None:
    """A block that is named whole is seen whole, a pair outside all blocks is seen by nobody."""
    documents = torch.tensor([0] * 7 + [1] + [2] * 8)
    whole = create_block_mask(
        lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j), None, None, 16, 16, "cpu", BLOCK_SIZE=4
    )
    queries = torch.tensor(rows)
    given = [whole.kv_num_blocks, whole.kv_indices, whole.full_kv_num_blocks, whole.full_kv_indices]
    own = torch.ops.piper.own_blocks(given, queries.int(), 4)
    assert [x.shape for x in own[:4]] == [(1, 1, 2), (1, 1, 2, 4)] * 2
    assert [x.shape for x in own[4:]] == [(1, 1, 4), (1, 1, 4, 2)] * 2
    seen = seen_by(documents, queries).view(2, 4, 4, 4)
    some, every = seen.any(3).any(1), seen.all(3).all(1)
    for partial_blocks, full_blocks in ((listed(own[0:2]), listed(own[2:4])), transposed(own[4:])):
        assert not (partial_blocks & full_blocks).any()
        assert (full_blocks <= every).all()
        assert (some <= partial_blocks | full_blocks).all()
        if all(row % 4 == 0 for row in rows[::4]):  # whole blocks of the sequence: as of these queries alone
            assert torch.equal(full_blocks, every) and torch.equal(partial_blocks, some & ~every)


def listed(blocks: list[Tensor]) -> Tensor:
    """Return which blocks a count and indices name."""
    counts, indices = (x[0, 0] for x in blocks)
    dense = torch.zeros(indices.shape, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        dense[row, indices[row, :count].long()] = True
    return dense


def transposed(blocks: list[Tensor]) -> tuple[Tensor, Tensor]:
    return listed(blocks[:2]).T, listed(blocks[2:]).T


class Asking(nn.Module):
    """Asks an attention for more than its output."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        heads = (x * self.scale).unflatten(-1, (2, 4)).transpose(1, 2)
        attend: Callable[..., Any] = flex_attention  # what it returns has another type in torch 2.11
        out, total = attend(heads, heads, heads, return_lse=True)
        loss: Tensor = out.sum() + total.sum()
        return loss


def test_a_ring_refuses_scores_that_change() -> None:
    with pytest.raises(CaptureError, match="a ring does not change scores, as its score_mod does") as refused:
        compile(job("softcap", "several", "ring"), device="cpu")
    assert "packed.py" in str(refused.value) and 'use attention="gather" there' in str(refused.value)


def test_documents_end_to_end_do_not_go_round_a_ring() -> None:
    with pytest.raises(CaptureError, match="its documents lie on several devices of a ring") as refused:
        compile(job("varlen", "several", "ring"), device="cpu")
    assert "packed.py" in str(refused.value) and 'attention="heads"' in str(refused.value)


def test_scores_that_are_trained_are_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"the score_mod of flex_attention reads .*, which is trained"
    ) as refused:
        compile(job("learned", "several", "zero"), device="cpu")
    assert "packed.py" in str(refused.value) and "attn_mask" in str(refused.value)


def test_a_ring_refuses_to_give_sums_of_scores() -> None:
    made = Job(
        model=Asking,
        loss=lambda model, fields: model(fields["x"]),
        data=lambda: [{"x": torch.zeros(2, 8, 8)}],
        strategy=[shard(at(), [0, 1], axis="CP", batch={"x": 1}, attention="ring")],
    )
    with pytest.raises(CaptureError, match="only the output is computed, not its log-sum-exp"):
        compile(made, device="cpu")
