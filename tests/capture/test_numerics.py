"""Chunks chained by hand give the loss, the gradients and the buffers of plain autograd, in fp64."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from tests import zoo
from tests.capture.capturing import captured, case, check, compare
from tests.capture.machine import Backward

# The same operations in the same order: not a bit may differ.
EXACT = ("mlp", "dropout", "decoder", "moe", "frozen", "frozen_stage", "sum_weight", "convnet")
# Hugging Face chooses other operations while it is traced; two stages add up the encoder's gradient.
CLOSE = ("llama_hf", "qwen3_hf", "qwen3_moe_hf", "encoder_decoder")


@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize("name", EXACT)
def test_chunks_equal_autograd_bit_for_bit(name: str, backward: Backward) -> None:
    assert compare(name, backward) == 0.0


@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize("name", CLOSE)
def test_chunks_equal_autograd(name: str, backward: Backward) -> None:
    assert compare(name, backward) < 1e-15


@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize(("name", "ways"), [("moe", 2), ("moe", 4), ("qwen3_moe_hf", 4)])
def test_divided_experts_equal_one_device(name: str, ways: int, backward: Backward) -> None:
    assert compare(name, backward, ways) < 1e-14


def test_nothing_falls_back() -> None:
    for name in (*EXACT, *CLOSE):
        assert captured(name).fallbacks == {}


@pytest.mark.parametrize("ways", [1, 4])
def test_expert_code_serves_any_number_of_rows(ways: int) -> None:
    code = captured("moe", ways)
    chunk = next(chunk for chunk in code.outline.chunks if chunk.kind == "expert")
    experts = case("moe").experts // ways
    up = torch.randn(experts, 32, 32, dtype=torch.float64, requires_grad=True)
    down = torch.randn(experts, 16, 32, dtype=torch.float64, requires_grad=True)
    for total in (0, 1, 7, 33):
        counts = torch.tensor([total] + [0] * (experts - 1)).roll(total)
        rows = torch.randn(total, 32, dtype=torch.float64, requires_grad=True)
        expert = int(counts.argmax())
        gate, value = (rows @ up[expert]).chunk(2, -1)
        wanted = (torch.nn.functional.silu(gate) * value) @ down[expert]
        grad = torch.randn_like(wanted)
        reads = {"rows": rows.detach(), "counts": counts}
        inputs = [reads["counts" if source.index else "rows"] for source in chunk.inputs]  # type: ignore[union-attr]
        result, *saved = code.phase(chunk.key, "F")(*inputs, up.detach(), down.detach())
        assert torch.allclose(result, wanted, rtol=0, atol=1e-13)
        spec = chunk.phases["B"]
        params = dict(zip(chunk.params, (up.detach(), down.detach()), strict=True))
        found = code.phase(chunk.key, "B")(
            *(inputs[index] for index in spec.inputs),
            *(params[name] for name in spec.params),
            *(saved[index] for index in spec.saved),
            grad,
        )
        for got, exact in zip(found, torch.autograd.grad(wanted, [rows, up, down], grad), strict=True):
            assert torch.allclose(got, exact, rtol=0, atol=1e-12)


def test_a_model_without_annotations_is_one_chunk() -> None:
    code = check(lambda: torch.nn.Sequential(torch.nn.Linear(16, 4)), zoo.regression, zoo.vectors(4, 0))
    assert [(chunk.name, chunk.tags) for chunk in code.outline.chunks] == [("all", ())]


def test_backward_uses_the_mask_that_the_forward_drew() -> None:
    """BI and BW run after another draw from the generator, and still agree with the forward's mask."""
    code = captured("dropout")
    assert len(code.outline.chunks) > 1
    for chunk in code.outline.chunks:
        assert chunk.random
        assert "dropout" in code.phase(chunk.key, "F").code  # type: ignore[attr-defined]
        for phase in ("B", "BI", "BW"):
            assert "aten.native_dropout.default" not in code.phase(chunk.key, phase).code  # type: ignore[attr-defined]


class Softened(nn.Module):
    """A softplus of a transposed value: its backward lays the gradient out otherwise than a trace says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).view(-1, 4, 4)
        result: Tensor = self.b(nn.functional.softplus(h).transpose(1, 2)).sum(1)
        return result


def test_gradients_that_a_kernel_lays_out_otherwise() -> None:
    check(Softened, zoo.regression, zoo.vectors(4, 0))


def test_a_gradient_of_zeros_has_memory() -> None:
    """Autograd has zeros without any for `sgn`; a gradient is added to, and sent."""

    class Signs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-2, 2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.sgn(self.weight) * x).sum()

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        value: Tensor = model(batch["x"])
        return value

    check(Signs, loss, {"x": torch.ones(3, 4)})
