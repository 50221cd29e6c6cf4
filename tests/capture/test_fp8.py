"""Products in fp8: their rounding in literal numbers, which products are chosen, and what they cost."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.capture.autodiff.differentiate import differentiate
from piper.capture.precision.fp8 import check_machine, fp8_linear, peaks_of
from piper.capture.trace.trace import Traced, trace
from piper.errors import ScheduleError
from piper.ir.chunk import Kernel
from piper.ir.chunk_options import CodeOptions
from tests import zoo
from tests.capture.capturing import traced


def wide(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


def test_the_forward_rounds_each_token_and_each_output_by_its_own_scale() -> None:
    # Scales are 1, 1/448 and 1, 2. 17 and 19 lie between two numbers of e4m3: the even one is taken.
    x = wide([[448.0, 17.0], [1.0, 17 / 448]])
    weight = wide([[448.0, 19.0], [896.0, 34.0]])
    found = fp8_linear(x, weight, torch.ones(2, dtype=torch.float64))
    assert found[0].tolist() == pytest.approx([448 * 448 + 16 * 20 + 1, 448 * 896 + 16 * 32 + 1], rel=1e-15)
    assert found[1].tolist() == pytest.approx([449 + 16 * 20 / 448, 897 + 16 * 32 / 448], rel=1e-15)


def test_the_gradient_of_the_input_uses_the_rounded_weight_of_the_forward() -> None:
    x, weight = wide([[448.0, 0.0]]), wide([[448.0, 19.0], [896.0, 34.0]])
    # The scales of the weight are 1 and 2: g times them is 17 and 448, and 17 rounds to 16.
    fp8_linear(x, weight).backward(torch.tensor([[17.0, 224.0]], dtype=torch.float64))
    assert x.grad is not None
    assert x.grad.tolist() == [[16 * 448.0 + 448 * 448.0, 16 * 20.0 + 448 * 16.0]]


def test_the_gradient_of_a_weight_has_one_scale_for_all_tokens() -> None:
    x, weight = wide([[448.0, 17.0], [19.0, 1.0]]), wide([[1.0, 1.0]])
    # 57344 is the largest of e5m2, whose numbers from 8 on are 8, 10, 12: 9 rounds to 8, the even one.
    fp8_linear(x, weight).backward(torch.tensor([[57344.0], [9.0]], dtype=torch.float64))
    assert weight.grad is not None
    assert weight.grad.tolist() == [[57344 * 448.0 + 8 * 20.0, 57344 * 16.0 + 8 * 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_jobs_multiply_with_wide_sums(dtype: torch.dtype) -> None:
    x, weight = torch.ones(1, 4096, dtype=dtype), torch.ones(1, 4096, dtype=dtype)
    found = fp8_linear(x, weight)
    assert found.dtype is dtype and found.item() == pytest.approx(4096.0, rel=1e-6)


def test_zeros_and_what_is_no_number() -> None:
    x, weight = wide([[0.0, 0.0], [1.0, 1.0]]), wide([[0.0, 0.0], [1.0, 1.0]])
    y = fp8_linear(x, weight)
    assert y.tolist() == [[0.0, 0.0], [0.0, pytest.approx(2.0, rel=1e-15)]]
    for bad in (float("nan"), float("inf")):
        assert not fp8_linear(wide([[bad, 1.0]]), weight).isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_peak_of_a_row_is_its_largest_magnitude(dtype: torch.dtype) -> None:
    tiny, nan, inf = torch.finfo(dtype).tiny, float("nan"), float("inf")
    rows = [[0.0, -0.0, 0.0], [1.0, -3.5, 2.0], [tiny, -tiny / 2, 0.0], [inf, -2.0, 1.0], [-inf, -nan, 1.0]]
    values = torch.tensor(rows, dtype=dtype)
    found, wanted = peaks_of(values), values.abs().amax(1, keepdim=True)
    torch.testing.assert_close(found, wanted.to(found.dtype), rtol=0, atol=0, equal_nan=True)


class Routed(nn.Module):
    """A router, two layers of which one is stored transposed, attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.router, self.up, self.head = nn.Linear(8, 3), nn.Linear(8, 8), nn.Linear(8, 11)
        self.down = nn.Parameter(torch.zeros(8, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.table(tokens)
        with piper.annotate("PP"):
            x = x + nn.functional.scaled_dot_product_attention(x, x, x)
            chosen = self.router(x).softmax(-1).topk(1).values
            x = x + torch.relu(self.up(x)) @ self.down * chosen
        with piper.annotate("PP"):
            logits: Tensor = self.head(x)
        return logits


def tokens_loss(model: nn.Module, batch: zoo.Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten())


@cache
def routed() -> Traced:
    return trace(Routed, tokens_loss, {"tokens": torch.zeros(2, 4, dtype=torch.int64)}, 2, "fp64")


def test_routers_and_the_head_are_left_alone() -> None:
    found = {chunk.name: chunk.products for chunk in routed().outline.chunks}
    assert found == {"PP=0": (), "PP=1": ("up.weight", "down"), "PP=2": ()}


def test_a_tied_head_keeps_its_weight_whole() -> None:
    products = [name for chunk in traced("decoder").outline.chunks for name in chunk.products]
    assert len(products) == 14 and not any("embed" in name or "head" in name for name in products)


def test_a_chosen_region_multiplies_in_fp8_in_every_phase() -> None:
    code = differentiate(routed(), {"PP=1": CodeOptions(products="fp8")})
    assert [chunk.precision for chunk in code.outline.chunks] == ["", "fp8", ""]
    first = code.outline.chunks[1]
    narrow = {
        phase: sum(
            kernel.count for kernel in spec.kernels if kernel.dtype.startswith("float8") and kernel.flops
        )
        for phase, spec in first.phases.items()
    }
    assert narrow == {"F": 2, "B": 4, "BI": 2, "BW": 2}
    forward = [kernel for kernel in first.phases["F"].kernels if kernel.dtype == "float8_e4m3fn"]
    product = next(kernel for kernel in forward if kernel.kind == "product")
    assert product == Kernel(
        kind="product", dtype="float8_e4m3fn", flops=1024, nbytes=product.nbytes, shape=(1, 8, 8, 8)
    )
    assert code.reasons() == ["PP=1: the products of 2 weights run in fp8"]


def test_saved_values_are_those_of_the_job_s_precision() -> None:
    plain = differentiate(routed()).outline.chunks[1]
    narrow = differentiate(routed(), {"PP=1": CodeOptions(products="fp8")}).outline.chunks[1]
    largest = sum(spec.nbytes for spec in narrow.saved) - sum(spec.nbytes for spec in plain.saved)
    assert (
        largest == 2 * 8 * 8 + 2 * 8 * 8
    )  # the largest magnitudes of tokens and of rows of weights, by product


class Twice(nn.Module):
    """Two products of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 4), nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = self.stem(x)
        with piper.annotate("PP"):
            made: Tensor = self.head(torch.sin(self.first(x)) + self.second(x))
        return made


def test_a_value_is_rounded_once_for_all_its_products() -> None:
    found = trace(Twice, zoo.regression, zoo.vectors(4, 0), 4, "fp64")
    code = differentiate(found, {"PP=1": CodeOptions(products="fp8")})
    key = code.outline.chunks[1].key
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
    counts = {}
    for phase in ("F", "BI", "BW"):
        module = code.phase(key, phase)
        assert isinstance(module, torch.fx.GraphModule)
        counts[phase] = sum(node.kwargs.get("dtype") in kinds for node in module.graph.nodes)
    assert counts == {"F": 3, "BI": 4, "BW": 3}  # x once and each weight; each gradient and weight; x once


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    check_machine("cpu", "precision #0")
    with pytest.raises(ScheduleError) as caught:
        check_machine("cuda", "precision #0")
    assert str(caught.value) == (
        "precision #0: this GPU has no products in fp8\n"
        "  here: A100, compute capability 8.0\n"
        "  hint: fp8 needs compute capability 8.9 (Ada, Hopper or later): leave precision out, or use "
        "--device cpu, where fp8 is emulated"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_machine("cuda", "precision #0")
