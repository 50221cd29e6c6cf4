"""What is kept between the phases when values are made again: fewer bytes, and the very same numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from piper.capture.autodiff.differentiate import Captured, CodeCache, differentiate
from piper.capture.trace.annotate import annotate
from piper.capture.trace.trace import trace
from piper.ir.chunk import Chunk
from piper.ir.chunk_options import CodeOptions
from tests import zoo
from tests.capture.capturing import ROWS, case, difference, traced
from tests.capture.machine import Backward

KINDS: tuple[Backward, ...] = ("whole", "split")


def kept(chunk: Chunk) -> int:
    """The bytes that live from F to the backward, a shared storage once."""
    shared = {spec.storage for spec in chunk.saved if spec.storage >= 0}
    return sum(spec.nbytes for spec in chunk.saved if spec.storage < 0) + sum(
        chunk.storages[i] for i in shared
    )


def with_budget(name: str, budget: float) -> Captured:
    found = traced(name)
    return differentiate(found, {chunk.name: CodeOptions(budget=budget) for chunk in found.outline.chunks})


@pytest.mark.parametrize("budget", [0.5, 0.0])
@pytest.mark.parametrize("name", ["mlp", "decoder", "moe", "convnet", "dropout"])
def test_gradients_are_the_same_bits_at_every_budget(name: str, budget: float) -> None:
    found, code = case(name), with_budget(name, budget)
    for backward in KINDS:
        whole, parts = (zoo.build(found, dtype=torch.float64) for _ in range(2))
        apart = difference(code, found.loss, whole, parts, found.batch(ROWS, 1), backward)
        assert apart == 0.0
    assert code.choices, "no chunk has a budget"
    for chunk in code.outline.chunks:
        if chunk.name in code.choices:
            choice = code.choices[chunk.name]
            assert kept(chunk) == choice.kept_bytes <= choice.all_bytes


def test_every_budget_uses_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    found = traced("mlp")
    known = CodeCache(found.device, compiled=found.compiled)
    differentiate(found, known=known)
    monkeypatch.setattr("piper.capture.autodiff.differentiate.trace_joint", None)
    options = {chunk.name: CodeOptions(budget=0.35) for chunk in found.outline.chunks}
    assert differentiate(found, options, known=known).choices


def test_bytes_follow_the_budget_and_work_moves_into_the_backward() -> None:
    plain = differentiate(traced("decoder")).outline.chunks
    before = [chunk.phases["B"].flops for chunk in plain]
    for budget in (0.7, 0.4, 0.1):
        chunks = with_budget("decoder", budget).outline.chunks
        for chunk, whole in zip(chunks, plain, strict=True):
            assert 0 < kept(chunk) <= budget * kept(whole)
            assert chunk.phases["F"].flops == whole.phases["F"].flops
        now = [chunk.phases["B"].flops for chunk in chunks]
        assert all(a >= b for a, b in zip(now, before, strict=True))
        before = now
    assert before > [chunk.phases["B"].flops for chunk in plain]


def test_the_second_half_does_not_repeat_the_first() -> None:
    chunks = with_budget("decoder", 0.1).outline.chunks
    assert len(chunks) > 1
    for chunk in chunks:
        halves = chunk.phases["BI"].flops + chunk.phases["BW"].flops
        assert halves == chunk.phases["B"].flops


def test_a_budget_of_one_keeps_what_is_kept_without() -> None:
    plain = differentiate(traced("decoder")).outline.chunks
    for chunk, whole in zip(with_budget("decoder", 1.0).outline.chunks, plain, strict=True):
        assert (chunk.saved, chunk.carried) == (whole.saved, whole.carried)
        assert chunk.key != whole.key


class Chooses(nn.Module):
    """A stage that draws a mask and chooses entries: neither may happen twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = nn.functional.dropout(torch.tanh(self.a(x)), 0.5)
            best = h.topk(4).indices
            result: Tensor = self.b(h.gather(-1, best).sigmoid())
        return result


def test_what_is_drawn_is_kept() -> None:
    """The mask, and the chosen entries, which cannot be made again without what the mask left of the others."""
    found = trace(Chooses, zoo.regression, zoo.vectors(4, 0), 4, "fp64")
    code = differentiate(found, {"PP=0": CodeOptions(budget=0.0)})
    chunk = code.outline.chunks[0]
    assert [(spec.dtype, spec.shape) for spec in chunk.saved] == [
        ("bool", (4, 16)),
        ("int64", (4, 4)),
        ("float64", (4, 4)),
    ]
    assert code.reasons() == [
        "PP=0: keeps 320 of 960 bytes from F to its backward, not 0 of them: the rest may not be made again"
    ]
    for backward in KINDS:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(Chooses().double())
        batch = {name: value.double() for name, value in zoo.vectors(4, 1).items()}
        assert difference(code, zoo.regression, models[0], models[1], batch, backward) == 0.0


class Routes(nn.Module):
    """A stage that chooses entries by what can be made again from its input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            scores = torch.tanh(self.a(x))
            result: Tensor = self.b(scores.gather(-1, scores.topk(4).indices))
        return result


def test_what_is_chosen_is_kept_though_it_could_be_chosen_again() -> None:
    """Made twice, of numbers that may differ in their last bit, a choice could be two choices."""
    found = trace(Routes, zoo.regression, zoo.vectors(4, 0), 4, "fp64")
    code = differentiate(found, {"PP=0": CodeOptions(budget=0.0)})
    (chunk,) = code.outline.chunks
    assert [(spec.dtype, spec.shape) for spec in chunk.saved] == [("int64", (4, 4))]
    assert kept(chunk) == 4 * 4 * 8


def test_experts_keep_their_rows_and_nothing_else() -> None:
    chunks = {chunk.name: chunk for chunk in with_budget("moe", 0.0).outline.chunks}
    assert chunks["PP=0 EP=0"].saved == ()
    assert 0 in chunks["PP=0 EP=0"].phases["B"].inputs


class Feeds(nn.Module):
    """A norm and a gated layer, behind products of a value whose gradient needs the results of these."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.q, self.norm = nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.RMSNorm(16)
        self.gate, self.up = (nn.Linear(16, 48, bias=False) for _ in range(2))
        self.down = nn.Linear(48, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.first(x)
        with annotate("PP"):
            q = torch.sin(self.q(x))
            h = self.norm(q @ q.T @ x)
            result: Tensor = self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return result


def assert_numbers_of_plain(code: Captured, model: Callable[[], nn.Module] = Feeds) -> None:
    """Check that the code of a model has the gradients of the plain model."""
    for backward in KINDS:
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(model().double())
        rows = {name: value.double() for name, value in zoo.vectors(8, 1).items()}
        assert difference(code, zoo.regression, models[0], models[1], rows, backward) < 1e-12


def test_compiled_code_writes_factors_again_where_it_reads_their_sources_anyway() -> None:
    code = differentiate(trace(Feeds, zoo.regression, zoo.vectors(8, 0), 8, "fp64", compiled=True))
    chunk = code.outline.chunks[1]
    # q before and behind sin, the scores, the norm's input and its scale, the gate and what it lets through;
    # neither the norm's output nor the gated product. The loss keeps what it is computed from.
    shapes = [(8, 16), (8, 16), (8, 8), (8, 16), (8, 1), (8, 48), (8, 48), (8, 4)]
    assert [spec.shape for spec in chunk.saved] == shapes
    # The second half gets both written by the first, and so needs neither gate nor what it lets through.
    assert [spec.shape for spec in chunk.carried].count((8, 48)) == 3
    assert {5, 6}.isdisjoint(chunk.phases["BW"].saved)
    assert_numbers_of_plain(code)


def test_a_factor_costs_one_more_write_and_no_kernel_of_its_own() -> None:
    code = differentiate(trace(Feeds, zoo.regression, zoo.vectors(8, 0), 8, "fp64", compiled=True))
    kernels = code.outline.chunks[1].phases["B"].kernels
    wide = 8 * 48 * 8
    # The gate, what it lets through and the product's gradient are read; the gate's gradient and the product
    # are written. What is let through has its gradient in a kernel of its own, without up.
    moved = [kernel.nbytes for kernel in kernels if kernel.kind == "traffic"]
    assert [nbytes for nbytes in moved if nbytes > 2 * wide] == [3 * wide, 5 * wide]


class Rectified(nn.Module):
    """A layer whose backward needs nothing but its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            result: Tensor = self.b(torch.relu(self.a(x)))
        return result


def test_a_factor_that_frees_nothing_is_not_written_again() -> None:
    code = differentiate(trace(Rectified, zoo.regression, zoo.vectors(8, 0), 8, "fp64", compiled=True))
    assert [spec.shape for spec in code.outline.chunks[0].saved] == [(8, 32), (8, 4)]
    backward = code.codes[code.outline.chunks[0].key].partition.sections["B"]  # type: ignore[union-attr]
    assert backward.writers == {}


def test_a_factor_of_a_product_that_is_recomputed_too_is_written_before_it() -> None:
    found = trace(Feeds, zoo.regression, zoo.vectors(8, 0), 8, "fp64", compiled=True)
    code = differentiate(found, {chunk.name: CodeOptions(budget=0.0) for chunk in found.outline.chunks})
    assert_numbers_of_plain(code)


class Crossed(nn.Module):
    """A layer that multiplies two products, one of them of a function of the other's factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.randn(16))
        self.a, self.b, self.down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.first(x)
        with annotate("PP"):
            h = torch.sin(x) * self.scale
            result: Tensor = self.down(self.b(torch.cos(h)) * self.a(h))
        return result


@pytest.mark.parametrize("budget", [None, 0.5, 0.3, 0.2, 0.0])
def test_a_factor_that_its_writer_is_computed_from_is_written_in_time(budget: float | None) -> None:
    found = trace(Crossed, zoo.regression, zoo.vectors(8, 0), 8, "fp64", compiled=True)
    options = {chunk.name: CodeOptions(budget=budget) for chunk in found.outline.chunks}
    assert_numbers_of_plain(differentiate(found, options), Crossed)
