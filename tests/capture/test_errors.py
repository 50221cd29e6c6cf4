"""What cannot be captured is refused with one message: where, what, why, and a way out."""

import random
import re
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piper.capture.autodiff.differentiate import differentiate
from piper.capture.trace.annotate import annotate, annotate_layers
from piper.capture.trace.trace import trace
from piper.capture.trace_errors import reason, without_result
from piper.errors import PiperError
from piper.experts import grouped_mm, route, unroute
from piper.ir.chunk_options import CodeOptions
from piper.losses import huggingface
from tests import zoo

HERE = Path(__file__).name
TRACED = "the loss must trace as one graph: no branch on a tensor's value, no .item(), no files inside"
A_LOSS = "return a scalar tensor (a mean), or a tuple (sum, weight) of two scalar tensors"


class Small(nn.Module):
    """Two layers, and whatever a test does with them."""

    n: Tensor

    def __init__(self, body: "Forward | None" = None) -> None:
        super().__init__()
        self.body = (body,)  # in a tuple: a function on a class would become a method
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.w = nn.Parameter(torch.randn(4, 16, 16))
        self.register_buffer("n", torch.zeros(()))

    def a(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(x)
        return result

    def b(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        body = self.body[0]
        return body(self, x) if body else self.b(self.a(x))


Forward = Callable[[Small, Tensor], Tensor]


def refusal(
    forward: Forward | None = None,
    *,
    model: Callable[[], nn.Module] | None = None,
    loss: Callable[..., object] = zoo.regression,
    batch: object = None,
    rows: int = 4,
) -> str:
    """The message of the error that capturing raises, with line numbers as `:N`."""
    given = zoo.vectors(4, 0) if batch is None else batch
    with pytest.raises(PiperError) as raised:
        trace(model or (lambda: Small(forward)), loss, given, rows)  # type: ignore[arg-type]
    return re.sub(r"(\w+\.py):\d+", r"\1:N", str(raised.value))


def lines(*text: str) -> str:
    return "\n".join(text)


def test_a_branch_on_a_value() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        return self.b(x) if x.sum() > 0 else self.b(self.a(x))

    assert refusal(forward) == lines(
        f"capture ({HERE}:N): the model and its loss cannot be captured",
        "  why:  Detected data-dependent branching (e.g. `if my_tensor.sum() > 0:`). Dynamo does not support "
        "tracing dynamic control flow.",
        f"  hint: {TRACED}",
    )


SCALE = ContextVar("SCALE", default=2.0)
DRAWS, OWN = torch.Generator(), random.Random(0)


def reads_a_context(self: Small, x: Tensor) -> Tensor:
    return self.b(x) * SCALE.get()


def differentiates(self: Small, x: Tensor) -> Tensor:
    hidden = self.a(x)
    return self.b(torch.autograd.grad(self.b(hidden).sum(), hidden, create_graph=True)[0])


def goes_backward(self: Small, x: Tensor) -> Tensor:
    self.b(x).sum().backward()
    return self.b(x)


def draws_from_a_generator(self: Small, x: Tensor) -> Tensor:
    return self.b(x + torch.randn(x.shape, generator=DRAWS))


def makes_a_generator(self: Small, x: Tensor) -> Tensor:
    return self.b(x + torch.randn(x.shape, generator=torch.Generator()))


def seeds(self: Small, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return self.b(x + torch.randn_like(x))


def draws_a_number(self: Small, x: Tensor) -> Tensor:
    return self.b(x) * random.random()


def draws_by_gauss(self: Small, x: Tensor) -> Tensor:
    return self.b(x) * random.gauss(0.0, 1.0)


def draws_with_numpy(self: Small, x: Tensor) -> Tensor:
    return self.b(x) * np.random.rand()


def aligns(self: Small, x: Tensor) -> Tensor:
    """How much of its result is used depends on the lengths, which are data."""
    lengths = torch.full((x.shape[0],), 2)
    return nn.functional.ctc_loss(
        self.b(x)[None].expand(4, -1, -1), lengths[:, None], lengths + 2, lengths - 1
    )


@torch.library.custom_op("piper_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, gradient: gradient / 2)


IN_THE_CONSTRUCTOR = (
    "read the variable in the model's constructor, into an attribute; what changes from step to step belongs "
    "in the batch"
)
WITH_FUNC = "write torch.func.grad(function)(x), which can be traced"
NO_GENERATOR = "draw without a generator: the job's seed decides what each step draws"
AN_OPERATOR = (
    "put the call into an operator of your own: torch.library.custom_op, with register_fake and "
    "register_autograd"
)
WITH_TORCH = (
    "draw with torch, in every step another number: torch.rand(()); or in data(), into a field of the batch"
)


@pytest.mark.parametrize(
    ("forward", "hint"),
    [
        (reads_a_context, IN_THE_CONSTRUCTOR),
        (differentiates, WITH_FUNC),
        (goes_backward, WITH_FUNC),
        (draws_from_a_generator, NO_GENERATOR),
        (makes_a_generator, NO_GENERATOR),
        (seeds, NO_GENERATOR),
        (draws_a_number, WITH_TORCH),
        (draws_by_gauss, WITH_TORCH),
        (draws_with_numpy, WITH_TORCH),
        (aligns, AN_OPERATOR),
    ],
)
def test_a_call_that_cannot_be_traced_is_refused_with_what_to_write(forward: Forward, hint: str) -> None:
    message = refusal(forward).splitlines()
    assert message[0] == f"capture ({HERE}:N): the model and its loss cannot be captured"
    assert message[2:] == [f"  hint: {hint}"]


@pytest.mark.parametrize(
    "draw", [lambda: random.randint(1, 3), lambda: random.uniform(0.0, 1.0), lambda: OWN.random()]
)
def test_a_number_that_python_draws_once(draw: Callable[[], float]) -> None:
    """Dynamo makes such a number an input of the graph, which would be a constant of the plan."""

    def forward(self: Small, x: Tensor) -> Tensor:
        return self.b(x) * draw()

    assert refusal(forward) == lines(
        f"capture ({HERE}:N): the model and its loss cannot be captured",
        "  why:  what Python's random drew for the trace would be the number of every step",
        f"  hint: {WITH_TORCH}",
    )


def test_what_the_hints_say_can_be_traced() -> None:
    class Scaled(Small):
        def __init__(self) -> None:
            super().__init__()
            self.scale = SCALE.get()

        def forward(self, x: Tensor) -> Tensor:
            slope: Tensor = torch.func.grad(lambda at: self.a(at).tanh().sum())(x)
            return self.b(halved(slope) + torch.randn_like(x)) * self.scale * torch.rand((), dtype=x.dtype)

    trace(Scaled, zoo.regression, zoo.vectors(4, 0), 4)


def test_an_error_of_the_model_itself() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        raise ValueError("not today")

    assert refusal(forward) == lines(
        f"capture ({HERE}:N): the loss, or the model in it, raised an exception",
        "  why:  ValueError('not today')",
        "  hint: call loss(model(), batch) without Piper to see the whole traceback, and if that works, under torch.compile",
    )


def test_shapes_that_do_not_fit() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        return self.b(x.view(3, 3))

    assert refusal(forward) == lines(
        f"capture ({HERE}:N): the loss, or the model in it, raised an exception",
        "  why:  RuntimeError(\"shape '[3, 3]' is invalid for input of size 64\")",
        "  hint: call loss(model(), batch) without Piper to see the whole traceback, and if that works, under torch.compile",
    )


def test_a_constructor_that_fails() -> None:
    def model() -> nn.Module:
        return nn.Linear(16 // int(torch.zeros(())), 4)

    assert refusal(model=model) == lines(
        f"capture ({HERE}:N): the model cannot be built",
        "  why:  ZeroDivisionError: integer division or modulo by zero",
        "  hint: build the model alone, without Piper, to see the whole traceback",
    )


def test_an_error_of_ours_passes_through() -> None:
    """From the loss, where Dynamo cannot trace how it is made, and from the model's constructor."""

    def small_layers() -> nn.Module:
        return annotate_layers(Small())

    assert refusal(loss=huggingface) == lines(
        "piper.losses.huggingface: the batch has no labels",
        "  fields: x, y",
        '  hint:   yield batches such as {"input_ids": ..., "attention_mask": ..., "labels": ...}. A model '
        "that is trained on no labels needs a loss of its own: lambda model, batch: model(**batch).loss",
    )
    assert refusal(model=small_layers).startswith(
        "annotate_layers: Small has no repeated layers\n  looked for:"
    )


@pytest.mark.parametrize(
    "width",
    [
        lambda: int(torch.full((), 16.0)),
        lambda: len(torch.arange(32).div(2, rounding_mode="floor").unique()),  # as RegNet counts its stages
        lambda: int(torch.arange(17).numpy()[-1]),  # as Inkling hands costs to scipy
    ],
    ids=["a value", "a length", "an array"],
)
def test_a_constructor_may_read_values(width: Callable[[], int]) -> None:
    def model() -> nn.Module:
        return nn.Linear(width(), 4)

    traced = trace(model, zoo.regression, zoo.vectors(2, 0), 2, "fp64")
    assert [(p.name, p.shape, p.dtype) for p in traced.outline.parameters] == [
        ("weight", (4, 16), "float64"),
        ("bias", (4,), "float64"),
    ]


def test_a_model_that_is_no_module() -> None:
    assert refusal(model=lambda: torch.relu) == lines(  # type: ignore[arg-type,return-value]
        "model: the model is not a module",
        "  got:  builtin_function_or_method",
        "  hint: model is a function that returns an nn.Module: model=lambda: Decoder(config)",
    )


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda loss: loss.expand(4), "its loss has shape [4]"),
        (lambda loss: (loss, loss.expand(2)), "its weight has shape [2]"),
        (lambda loss: {"loss": loss}, "it returns dict"),
        (lambda loss: (loss, 4), "it returns (a tensor, int)"),
        (lambda loss: (loss, loss, loss), "it returns (a tensor, a tensor, a tensor)"),
        (lambda loss: loss.item(), "it returns a Python number"),
        (lambda loss: None, "it returns no tensor"),
    ],
)
def test_a_loss_that_is_no_loss(result: Callable[[Tensor], object], got: str) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> object:
        return result(zoo.regression(model, batch))

    assert refusal(loss=loss) == lines("loss: the loss is not a loss", f"  got:  {got}", f"  hint: {A_LOSS}")


def test_a_loss_without_an_operation() -> None:
    assert refusal(loss=lambda model, batch: 0.5) == lines(
        "loss: the loss is not a loss", "  got:  it returns no tensor", f"  hint: {A_LOSS}"
    )


@pytest.mark.parametrize("message", ["", "out.backend_input must not be None"])  # torch 2.11, torch 2.13
def test_torch_says_in_two_ways_that_there_is_no_operation(message: str) -> None:
    backend_input = None
    with pytest.raises(AssertionError) as found:
        if message:
            raise AssertionError(message)
        else:
            assert backend_input is not None
    assert without_result(found.value)


@pytest.mark.parametrize(
    ("debug", "shown"),
    [
        ("KeyError('y')", "KeyError('y')"),  # torch 2.13; the others 2.11
        (
            "KeyError([ConstantVariable(str: 'Dict key lookup failed for ConstantVariable(str: \\'y\\'). "
            "Debug representation of the key is \"\\'y\\'\"')])",
            "KeyError('y')",
        ),
        (
            'KeyError([ConstantVariable(str: "Dict key lookup failed for ConstantVariable(int: 3). '
            "Debug representation of the key is '3'\")])",
            "KeyError(3)",
        ),
    ],
)
def test_the_reason_of_a_failed_lookup_is_its_key(debug: str, shown: str) -> None:
    text = f"Observed exception\n  Explanation: none\n\n  Developer debug context: raised exception {debug}\n"
    assert reason(RuntimeError(text)) == shown


@pytest.mark.parametrize("weight", ["parameter", "output"])
def test_a_weight_that_has_a_gradient(weight: str) -> None:
    """Gradients are those of the sum alone, so the weight's own would be lost."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> object:
        out = model(batch["x"])
        return (out**2).sum(), (next(model.parameters()) if weight == "parameter" else out).abs().sum()

    assert refusal(loss=loss) == lines(
        f"loss ({HERE}:N): the weight of the loss depends on parameters",
        "  but:  gradients are those of the sum, divided by the total weight of the batch",
        "  hint: detach it: return loss, weight.detach(); or return a mean, whose gradient is that of both",
    )


@pytest.mark.parametrize(
    "weigh", [lambda out: out.detach().abs().sum(), lambda out: (out > 0).sum(), lambda out: out.new_ones(())]
)
def test_a_weight_without_a_gradient(weigh: Callable[[Tensor], Tensor]) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> object:
        out = model(batch["x"])
        return (out**2).sum(), weigh(out)

    outline = trace(Small, loss, zoo.vectors(2, 0), 2).outline
    assert outline.weight is not None


def test_a_loss_that_trains_nothing() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        return self.b(x).detach()

    assert refusal(forward) == lines(
        "loss (zoo.py:N): the loss does not depend on any trainable parameter",
        "  hint: check for detach(), no_grad() and requires_grad=False between the parameters and the loss",
    )


def test_a_tag_that_at_could_not_take() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        with annotate("PASS"):
            return self.b(x)

    assert refusal(forward) == lines(
        "annotate: 'PASS' cannot name a region",
        "  hint: a tag is a word that at() can take as a keyword, and not PASS: PP, EP, stage",
    )


def test_a_tensor_that_is_no_buffer() -> None:
    class Hidden(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 4)
            self.scale = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    assert refusal(model=Hidden) == lines(
        "model: the model uses a tensor that is neither a parameter nor a buffer",
        "  tensor: scale",
        "  hint:   make it known: self.register_buffer(name, tensor, persistent=False); "
        "outside the class: model.register_buffer('scale', vars(model).pop('scale'), persistent=False)",
    )
    message = refusal(model=lambda: nn.Sequential(nn.Linear(16, 16), Hidden()))
    assert "  tensor: 1.scale\n" in message
    assert (
        "class: model[1].register_buffer('scale', vars(model[1]).pop('scale'), persistent=False)" in message
    )


def test_a_parameter_that_the_loss_has() -> None:
    class Weighted(nn.Linear):
        def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
            total: Tensor = super().forward(model(batch["x"])).mean()
            return total

    assert refusal(loss=Weighted(4, 1, bias=False)) == lines(
        "model: the model uses a tensor that is neither a parameter nor a buffer",
        "  tensor: L_self_loss_0_parameters_weight_",
        "  hint:   make it a parameter of the model, which the loss gets: only those are trained",
    )


def test_a_buffer_that_is_replaced() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        self.n = self.n + 1
        return self.b(x)

    assert refusal(forward) == lines(
        "model: the forward replaces a buffer or parameter",
        "  module: the model itself",
        "  hint:   change a buffer in place: self.steps.add_(1), not self.steps = self.steps + 1",
    )


def test_a_buffer_that_is_removed() -> None:
    class Once(Small):
        def forward(self, x: Tensor) -> Tensor:
            y = self.b(x) + self.n
            self.n = None  # type: ignore[assignment]
            return y

    model = lambda: nn.Sequential(nn.Linear(16, 16), Once())  # noqa: E731
    assert refusal(model=model).startswith("model: the forward replaces a buffer or parameter\n  module: 1\n")


def test_a_buffer_that_is_replaced_beside_parameters_that_are_put_back() -> None:
    def loss(model: Small, batch: dict[str, Tensor]) -> Tensor:
        y: Tensor = torch.func.functional_call(model, dict(model.named_parameters()), (batch["x"],))
        model.n = model.n + 1
        return y.square().mean()

    assert refusal(loss=loss).startswith("model: the forward replaces a buffer or parameter\n")


LEFT_BEHIND = "model or loss: the forward computes with what its last call left behind"
IN_A_BUFFER = "  hint:    keep it in a buffer of the model, and change that in place: self.steps.add_(1)"


def test_a_number_that_counts_calls() -> None:
    class Warmup(Small):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.b(x) * min(1, self.calls / 10)

    model = lambda: nn.Sequential(nn.Linear(16, 16), Warmup())  # noqa: E731
    assert refusal(model=model) == lines(LEFT_BEHIND, "  changed: 1.calls (1)", IN_A_BUFFER)


@pytest.mark.xfail(
    torch.__version__.startswith("2.11."), reason="Dynamo of torch 2.11 refuses it in its words"
)
def test_a_number_of_a_class() -> None:
    class Shared:
        calls = 2

    def forward(self: Small, x: Tensor) -> Tensor:
        Shared.calls += 1
        return self.b(x) * Shared.calls

    assert refusal(forward) == lines(LEFT_BEHIND, "  changed: Shared.calls (2, then 3)", IN_A_BUFFER)
    assert Shared.calls == 2, "a capture changes nothing"


def test_a_tensor_that_the_last_call_left() -> None:
    class Recurrent(Small):
        state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x) if self.state is None else self.a(x) + self.state
            self.state = x.detach()
            return self.b(x)

    assert refusal(model=Recurrent) == lines(LEFT_BEHIND, "  changed: state (a tensor)", IN_A_BUFFER)


def test_attributes_that_only_the_same_call_reads() -> None:
    """A count that nothing computes with, a loss of a layer's own, and a table that the first call makes."""

    class Harmless(Small):
        calls = 0
        table: Tensor | None = None
        penalty: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.table is None:
                self.table = torch.arange(16, device=x.device).to(x) + torch.zeros_like(x[0])
            x = self.a(x) + self.table
            self.penalty = x.square().mean()
            return self.b(x)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert isinstance(model, Harmless)
        return zoo.regression(model, batch) + model.penalty

    made = Harmless()
    trace(lambda: made, loss, zoo.vectors(4, 0), 4)
    assert (made.calls, made.table, hasattr(made, "penalty")) == (0, None, False)


def test_a_buffer_that_two_regions_share() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        with annotate("PP"):
            self.n.add_(1)
            x = self.a(x)
        with annotate("PP"):
            return self.b(x) * self.n

    assert refusal(forward) == lines(
        "model: n is changed by one region and read by another",
        "  changed: PP=0",
        "  read:    PP=1",
        "  hint:    give each region a module of its own, or put both uses into one region",
    )


def test_a_parameter_that_the_forward_changes() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.9)
        return self.b(self.a(x))

    assert refusal(forward) == lines(
        f"mul_ ({HERE}:N): the forward changes the parameter first.weight in place",
        "  hint: compute a new tensor, as x = x.clone() is, or keep what changes in a buffer",
    )


def test_an_input_that_the_forward_changes_in_part() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        x[0].mul_(2)
        return self.b(x)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        total: Tensor = model(batch["x"]).sum()
        return total

    assert refusal(forward, loss=loss) == lines(
        f"mul_ ({HERE}:N): the forward changes a part of the input x in place",
        "  hint: compute a new tensor, as x = x.clone() is, or keep what changes in a buffer",
    )


def test_a_view_that_another_region_changes() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
            first = x[0]
        with annotate("PP"):
            first.mul_(3)
        with annotate("PP"):
            return self.b(x)

    assert refusal(forward) == lines(
        f"mul_ ({HERE}:N): a tensor is changed in place while another region sees it under another name",
        "  hint: write x = x + y instead of x += y there, or clone the view first",
    )


def test_a_number_that_leaves_its_region() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
            scale = x.sum().item()
        with annotate("PP"):
            return self.b(x * scale)

    assert refusal(forward) == lines(
        f"item ({HERE}:N): a number that is read off a tensor leaves its region",
        "  region: PP=0",
        "  hint:   keep .item(), nonzero() and whatever depends on their sizes within one region",
    )


ROUTE_FIRST = (
    "  hint: write rows, counts = route(x, counts), make y from these rows, and end with unroute(y, counts, n); "
    "use everything else before or after: the rows may be on another device"
)


def routed(self: Small, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    counts = torch.ones(4, dtype=torch.int64)
    rows, received = route(self.a(x), counts)
    return rows, received, counts


def test_rows_that_meet_what_was_not_routed() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        rows, received, _ = routed(self, x)
        y = grouped_mm(rows, self.w, received) * x.mean()
        return self.b(unroute(y, received, 4))

    assert refusal(forward) == lines(
        f"y ({HERE}:N): what lies between route and unroute must come from the rows, the counts and the weights",
        f"  but:  mean ({HERE}:N) was not routed",
        ROUTE_FIRST,
    )


def test_rows_that_are_never_unrouted() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        rows, received, _ = routed(self, x)
        return grouped_mm(rows, self.w, received).sum()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        result: Tensor = model(batch["x"])
        return result

    assert refusal(forward, loss=loss) == lines(
        f"result_2 ({HERE}:N): what lies between route and unroute must come from the rows, the counts and the weights",
        "  but:  these rows have not been unrouted",
        ROUTE_FIRST,
    )


def test_counts_that_are_not_those_of_the_route() -> None:
    def forward(self: Small, x: Tensor) -> Tensor:
        rows, received, counts = routed(self, x)
        return self.b(unroute(grouped_mm(rows, self.w, received), counts, 4))

    assert refusal(forward) == lines(
        f"result_2 ({HERE}:N): what lies between route and unroute must come from the rows, the counts and the weights",
        "  but:  these rows and counts do not come from one route",
        ROUTE_FIRST,
    )


class SharedBias(nn.Module):
    """An expert region that uses a weight which is not one for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.bias, self.head = (
            nn.Parameter(torch.randn(4, 16, 16)),
            nn.Parameter(torch.zeros(16)),
            nn.Linear(16, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        with annotate("EP"):
            rows, received = route(x, torch.ones(4, dtype=torch.int64))
            y = unroute(grouped_mm(rows, self.w, received) + self.bias, received, 4)
        result: Tensor = self.head(y)
        return result


def test_a_weight_that_cannot_be_divided_by_expert() -> None:
    traced = trace(SharedBias, zoo.regression, zoo.vectors(4, 0), 4)
    differentiate(traced)  # on one device it may stay
    with pytest.raises(PiperError) as raised:
        differentiate(traced, {"EP=0 #1": CodeOptions(ways=2)})
    assert str(raised.value) == lines(
        "EP=0 #1: bias cannot be sharded by expert",
        "  shape:   [16]",
        "  experts: 4",
        "  hint:    between route and unroute use weights of shape [experts, ...]; use others outside",
    )
