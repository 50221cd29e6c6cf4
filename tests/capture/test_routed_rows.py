"""Experts that look at more than single rows are refused where a device has some of the rows only."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.capture.trace.assemble import Body
from piper.capture.trace.routed_rows import check_rows
from piper.capture.trace.trace import trace
from piper.errors import CaptureError
from tests import plain
from tests.runtime import moving

WIDTH, EXPERTS, ROWS = 6, 8, 16
Work = Callable[[Tensor, Tensor, Tensor], Tensor]  # rows, counts, weights of [experts, WIDTH]


def expert_of_row(counts: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(counts.shape[0]), counts)


def biased(h: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    return h + w[torch.repeat_interleave(counts, output_size=h.shape[0])]


def per_expert(h: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    sums = torch.zeros(counts.shape[0], WIDTH, dtype=h.dtype).index_add(0, expert_of_row(counts), h)
    return h - sums[expert_of_row(counts)]


def per_expert_mean(h: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    sums = torch.zeros(counts.shape[0], WIDTH, dtype=h.dtype).index_add(0, expert_of_row(counts), h)
    return h - (sums / counts.clamp(min=1)[:, None])[expert_of_row(counts)]


SINGLE_ROWS: dict[str, Work] = {
    "per row": lambda h, counts, w: torch.where(h > 0, h, 0.1 * h).clamp(max=3) * torch.sigmoid(1.7 * h),
    "a bias by expert": biased,
    "layer norm": lambda h, counts, w: F.layer_norm(h, (WIDTH,)),
    "RMS norm": lambda h, counts, w: F.rms_norm(h, (WIDTH,)) + F.normalize(h, dim=-1),
    "softmax of features": lambda h, counts, w: h.softmax(-1) + h.cumsum(1) + h.flip(-1),
    "features apart": lambda h, counts, w: torch.cat([h[:, ::2].sin(), h[:, 1::2]], dim=-1),
    "heads": lambda h, counts, w: F.layer_norm(h.view(-1, 3), (3,)).view(h.shape[0], WIDTH),
    "largest features": lambda h, counts, w: h.sort(-1).values / h.abs().amax(-1, keepdim=True),
    "products of features": lambda h, counts, w: torch.einsum("nd,ne->nd", h, h) @ torch.ones(6, 6).to(h),
    "transposed": lambda h, counts, w: (h.T * 2).cumsum(0).T,
    "weights": lambda h, counts, w: h + w.softmax(-1)[expert_of_row(counts)],
}


def torch_product(h: Tensor, counts: Tensor, w: Tensor) -> Tensor:
    """Multiply as models do that have no operation of ours: in bf16, by where the rows of an expert end."""
    square = F.pad(w[:, :, None] * w[:, None, :], (0, 2, 0, 2)).bfloat16()
    ends = counts.cumsum(0).to(torch.int32)
    return torch._grouped_mm(F.pad(h, (0, 2)).bfloat16(), square, offs=ends)[:, :WIDTH].to(h)


OF_ONE_EXPERT: dict[str, Work] = {"a sum": per_expert, "a mean": per_expert_mean}
COMBINED = "it combines rows of several experts, which lie on several devices"
PICKED = "it picks rows by their places, at which each device has other rows"
NUMBERS = "it computes with numbers of rows or experts, and each device has its own"
EXPERTS_COMBINED = "it combines or picks experts, and each device has others"
UNSHARDED = "it looks up a number of an expert, of which each device has its own, in what is not sharded"
SEVERAL: dict[str, tuple[Work, str]] = {
    "mean": (lambda h, counts, w: h - h.mean(0), COMBINED),
    "mean of all": (lambda h, counts, w: h - h.mean(), COMBINED),
    "norm": (lambda h, counts, w: h / h.norm(), COMBINED),
    "scale": (lambda h, counts, w: h / h.abs().max(), COMBINED),
    "softmax": (lambda h, counts, w: h.softmax(0), COMBINED),
    "softmax of all": (lambda h, counts, w: h.view(-1).softmax(0).view(h.shape[0], WIDTH), COMBINED),
    "running sum": (lambda h, counts, w: h.cumsum(0), COMBINED),
    "reversed": (lambda h, counts, w: h.flip(0), COMBINED),
    "sorted": (lambda h, counts, w: h.sort(0).values, COMBINED),
    "product": (lambda h, counts, w: h @ (h.T @ h), COMBINED),
    "attention": (lambda h, counts, w: F.scaled_dot_product_attention(h[None], h[None], h[None])[0], COMBINED),
    "first row": (lambda h, counts, w: h - h[:1].sum(), COMBINED),
    "other places": (lambda h, counts, w: h[torch.arange(h.shape[0]) // 2], PICKED),
    "written places": (lambda h, counts, w: h.index_copy(0, expert_of_row(counts), h), PICKED),
    "number of rows": (lambda h, counts, w: h / h.shape[0] ** 0.5, NUMBERS),
    "number of rows in a tensor": (lambda h, counts, w: h / torch.full((1,), h.shape[0]).to(h), NUMBERS),
    "place": (lambda h, counts, w: h * torch.arange(h.shape[0])[:, None], NUMBERS),
    "mask of places": (lambda h, counts, w: h.masked_fill((torch.arange(h.shape[0]) < 2)[:, None], 0), NUMBERS),
    "number of an expert": (lambda h, counts, w: h * expert_of_row(counts)[:, None], NUMBERS),
    "rows of all experts": (lambda h, counts, w: h / counts.sum(), EXPERTS_COMBINED),
    "first expert": (lambda h, counts, w: h + w[0], EXPERTS_COMBINED),
    "mean of experts": (lambda h, counts, w: h + w.mean(0), EXPERTS_COMBINED),
    "softmax over experts": (lambda h, counts, w: h + w.softmax(0)[expert_of_row(counts)], EXPERTS_COMBINED),
    "chosen expert": (lambda h, counts, w: h + w[torch.tensor([1])], EXPERTS_COMBINED),
    "table": (lambda h, counts, w: h * torch.linspace(1, 2, 8).to(h)[expert_of_row(counts)][:, None], UNSHARDED),
}  # fmt: skip


class Worked(nn.Module):
    """Experts that work as they are told, one region after another."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self.works = tuple(works)
        self.dense, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.w = nn.ParameterList(torch.randn(EXPERTS, WIDTH) for _ in works)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x).flatten(0, -2)
        score, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, chosen, torch.ones_like(chosen))
        for work, w in zip(self.works, self.w, strict=True):
            x = x + self.routed(x[order], counts, w, work)[order.argsort()].tanh() / 4
        result: Tensor = x * score[:, None]
        return result

    def routed(self, rows: Tensor, counts: Tensor, w: Tensor, work: Work) -> Tensor:
        with piper.annotate("EP"):
            received, mine = piper.route(rows, counts)
            result: Tensor = piper.unroute(work(received, mine, w), mine, len(rows))
        return result


class PlainWorked(Worked):
    def routed(self, rows: Tensor, counts: Tensor, w: Tensor, work: Work) -> Tensor:
        return work(rows, counts, w)


def bodies(works: list[Work]) -> list[Body]:
    """Return the code of each region, from one capture."""
    batch = {"x": torch.randn(ROWS, WIDTH)}
    traced = trace(lambda: Worked(works), moving.loss, batch, ROWS)
    experts = [piece.body for piece in traced.pieces if piece.chunk.kind == "expert" and piece.body]
    assert len(experts) == len(works)
    return experts


def refusal(body: Body, *, sharded: bool = True, apart: bool = False) -> str:
    with pytest.raises(CaptureError) as caught:
        check_rows(body, "EP=0 #1", sharded=sharded, apart=apart)
    return str(caught.value)


def test_single_rows_and_what_belongs_to_their_experts() -> None:
    for body in bodies([*SINGLE_ROWS.values(), torch_product]):
        for sharded in (True, False):
            check_rows(body, "", sharded=sharded, apart=True)


def test_rows_of_one_expert_where_a_device_has_just_these() -> None:
    for body in bodies([*OF_ONE_EXPERT.values()]):
        check_rows(body, "", sharded=True, apart=False)
        for sharded in (True, False):
            assert "it combines the rows of an expert, or their number" in refusal(
                body, sharded=sharded, apart=True
            )


def test_rows_of_several_experts_and_what_differs_by_device() -> None:
    for (name, (_, why)), body in zip(
        SEVERAL.items(), bodies([work for work, _ in SEVERAL.values()]), strict=True
    ):
        assert f"why:    {why}" in refusal(body), name


def averaged() -> nn.Module:
    return Worked([SEVERAL["mean"][0]])


def test_the_message_says_where_and_why() -> None:
    with pytest.raises(CaptureError) as caught:
        moving.program(moving.cloned(clones=0), model=averaged)
    assert re.sub(r":\d+", "", str(caught.value)) == (
        f"mean ({Path(__file__).name}): what is computed here depends on which rows and experts a device has\n"
        "  region: EP=0 #1\n"
        "  why:    it combines rows of several experts, which lie on several devices\n"
        "  hint:   between route and unroute compute with single rows and the weights of their experts; do "
        "this before route or after unroute, or do not shard this region"
    )
    moving.program([], model=averaged)  # one device has all rows


def test_rows_of_a_sharded_sequence() -> None:
    data = [{"x": torch.randn(4, 8, WIDTH, dtype=torch.float64)}]
    strategy = [piper.replicate(piper.at(), [0, 1]), piper.shard(piper.at(), [0, 1], batch={"x": 1})]
    with pytest.raises(CaptureError, match="what is computed here depends on which rows"):
        moving.program(strategy, model=averaged, data=lambda: data)
    moving.program(strategy, model=lambda: Worked([SINGLE_ROWS["per row"]]), data=lambda: data)


def test_a_size_that_holds_for_all_experts_alone() -> None:
    (body,) = bodies([lambda h, counts, w: h + w.view(EXPERTS, 2, 3).flatten(1)[expert_of_row(counts)]])
    assert "why:    it works for one number of rows or experts only: " in refusal(body)


class Scaled(Worked):
    """Experts whose results have one scale."""

    def __init__(self) -> None:
        super().__init__([lambda h, counts, w: biased(h, counts, w) * self.scale])
        self.scale = nn.Parameter(torch.tensor(0.5))


def test_a_parameter_that_is_one_number_where_a_device_has_all_experts() -> None:
    batches = moving.batches(2)
    with piper.launch(moving.program([], plain.sgd, model=Scaled), on="inline") as run:
        losses = [run.step(batch).loss for batch in batches]
        state = run.state_dict()
    wanted = plain.train(Scaled, moving.loss, batches)
    assert losses == pytest.approx(wanted.losses, abs=1e-9)
    assert plain.largest_difference(wanted.state, state) < 1e-9


@pytest.mark.parametrize("capacity", [None, 2])
def test_what_is_allowed_has_the_numbers_of_plain_pytorch(capacity: float | None) -> None:
    works = [*SINGLE_ROWS.values(), *(OF_ONE_EXPERT.values() if capacity is None else ())]
    batches = moving.batches(2)
    strategy = [
        piper.replicate(piper.at(), range(4)),
        piper.shard(piper.at(EP="*"), range(4), capacity=capacity),
    ]
    with piper.launch(moving.program(strategy, plain.sgd, model=lambda: Worked(works)), on="inline") as run:
        losses = [run.step(batch).loss for batch in batches]
        state = run.state_dict()
    wanted = plain.train(lambda: PlainWorked(works), moving.loss, batches)
    assert losses == pytest.approx(wanted.losses, abs=1e-9)
    assert plain.largest_difference(wanted.state, state) < 1e-9
