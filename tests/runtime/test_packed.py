"""Packed documents give the numbers of one device, and those of each document by itself."""

from collections.abc import Callable, Mapping
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from piper.compiler import compile
from piper.directives import Directive, place, replicate, shard, split
from piper.errors import CaptureError
from piper.ir.select import at
from piper.job import Job
from piper.run.launch import launch_inline
from piper.schedules import one_f_one_b
from tests.runtime.divided import checked
from tests.runtime.packed import FIELDS, PACKINGS, WEIGHTS, Packed, batch, by_document, loss
from tests.runtime.sharing import Shared

Strategy = Callable[[], list[Directive]]


def context(ways: int, attention: str, balance: str | None = None) -> list[Directive]:
    """Shard the sequence over a group."""
    return [shard(at(), range(ways), axis="CP", batch=FIELDS, attention=attention, balance=balance)]


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
    ("flex", "several", "gather zigzag"),
    ("flex", "several", "ring zigzag"),
]
REST = [
    (kind, packing, strategy)
    for kind in ("flex", "sdpa", "alibi", "softcap")
    for packing in PACKINGS
    for strategy in STRATEGIES
    if (kind, packing, strategy) not in ALWAYS
    and (packing == "several" or (kind == "flex" and strategy in ("1f1b", "sp", "gather", "ring zigzag")))
    and not (kind in ("alibi", "softcap") and "ring" in strategy)
]


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
        *(
            pytest.param(kind, packing, strategy, marks=pytest.mark.slow)
            for kind, packing, strategy in (
                ("alibi", "single tokens", "1f1b"),
                ("softcap", "several", "gather4 zigzag"),
                ("sdpa", "several", "ring"),
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
    wanted = by_document(model, fields, PACKINGS[packing])
    wanted.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert result.loss == pytest.approx(wanted.item(), rel=1e-12)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-9)


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
        out, total = flex_attention(heads, heads, heads, return_lse=True)
        return out.sum() + total.sum()


def test_a_ring_refuses_scores_that_change() -> None:
    with pytest.raises(CaptureError, match="a ring does not change scores, as its score_mod does") as refused:
        compile(job("softcap", "several", "ring"), device="cpu")
    assert "packed.py" in str(refused.value) and 'use attention="gather" there' in str(refused.value)


def test_a_ring_refuses_to_give_sums_of_scores() -> None:
    made = Job(
        model=Asking,
        loss=lambda model, fields: model(fields["x"]),
        data=lambda: [{"x": torch.zeros(2, 8, 8)}],
        strategy=[shard(at(), [0, 1], axis="CP", batch={"x": 1}, attention="ring")],
    )
    with pytest.raises(CaptureError, match="only the output is computed, not its log-sum-exp"):
        compile(made, device="cpu")
