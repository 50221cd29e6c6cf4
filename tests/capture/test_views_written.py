"""Values that are written in place while views of them are read: losses and gradients are those of plain PyTorch."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate
from piper.compiler import compile
from piper.directives import Directive, place, shard
from piper.errors import CaptureError
from piper.ir.select import at
from piper.job import Job
from piper.run.launch import launch_inline
from tests.plain import sgd

WIDTH = 8


class Net(nn.Module):
    """One of the forms below, and a layer behind it in a region of its own."""

    b: Tensor

    def __init__(self, form: "Form") -> None:
        super().__init__()
        self.form = [form]  # in a list: it is no part of the model's state
        self.w, self.u = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("b", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = self.form[0](self, x)
        with annotate("PP"):
            result: Tensor = self.u(h)
        return result


Form = Callable[["Net", Tensor], Tensor]


def layer(net: Net, x: Tensor) -> Tensor:
    result: Tensor = net.w(x)
    return result


def after(view: Callable[[Tensor], Tensor], write: Callable[[Tensor], object]) -> tuple[Form, Form]:
    """Make a view, write into what it views, and read both: of an input, and of a value of the forward."""

    def of_input(net: Net, x: Tensor) -> Tensor:
        seen = view(x)
        write(x)
        return layer(net, x) + seen.sum()

    def of_value(net: Net, x: Tensor) -> Tensor:
        h = layer(net, x) * 1
        seen = view(h)
        write(h)
        return h + seen.sum() * x

    return of_input, of_value


def assign(x: Tensor) -> None:
    x[:, 0] = 3.0


PAIRS = {
    "select, add": after(lambda x: x[0], lambda x: x.add_(1)),
    "view, multiply": after(lambda x: x.view(-1), lambda x: x.mul_(2)),
    "chained, power": after(lambda x: x.view(-1)[2:].view(31, 2).t()[1], lambda x: x.pow_(2)),
    "transpose, copy": after(lambda x: x.t()[0], lambda x: x.copy_(x.flip(0))),
    "detach, multiply": after(lambda x: x.detach(), lambda x: x.mul_(2)),
    "data, add": after(lambda x: x.data, lambda x: x.add_(1)),
    "itself by another name, add": after(lambda x: x.contiguous(), lambda x: x.add_(1)),
    "overlap, assign": after(lambda x: x[:, 0:2], assign),
    "expanded, zero": after(lambda x: x[:, :1].expand(-1, 8), lambda x: x.zero_()),
    "several, fill": after(lambda x: x[0] + x.view(-1)[:8] * x.t()[1], lambda x: x.fill_(0.5)),
    "copy, add": after(lambda x: x.t().reshape(-1)[:4], lambda x: x.add_(1)),
}


def through_a_view(net: Net, x: Tensor) -> Tensor:
    h = layer(net, x) * 1
    h.t()[1].mul_(3)
    return h * 2


def view_of_a_view(net: Net, x: Tensor) -> Tensor:
    h = layer(net, x) * 1
    flat, row = h.view(-1), h[1]
    row.add_(x[0])
    return h + flat.sum()


def both_ways(net: Net, x: Tensor) -> Tensor:
    h = layer(net, x) * 1
    row = h[0]
    h.add_(1)
    row.mul_(2)
    return h + row


def of_a_weight(net: Net, x: Tensor) -> Tensor:
    w = net.w.weight.t() * 1
    row = w.t()[0]
    w.mul_(2)
    return x @ w + row


def of_a_buffer(net: Net, x: Tensor) -> Tensor:
    half = net.b[:4]
    net.b.mul_(2)
    half.add_(1)
    return layer(net, x) + net.b + half.sum()


def reshaped_in_place(net: Net, x: Tensor) -> Tensor:
    h = layer(net, x) * 1
    row = h[0]
    h.unsqueeze_(0)
    h.add_(1)
    return h.squeeze(0) + row


def without_gradients(net: Net, x: Tensor) -> Tensor:
    h = layer(net, x) * 1
    row = h[0]
    with torch.no_grad():
        h.mul_(2)
    return h.sin() + row


FORMS: Mapping[str, Form] = {
    **{f"input: {name}": forms[0] for name, forms in PAIRS.items()},
    **{
        f"value: {name}": forms[1]
        for name, forms in PAIRS.items()
        if "zero" not in name and "fill" not in name
    },
    **{
        form.__name__: form
        for form in (
            through_a_view,
            view_of_a_view,
            both_ways,
            of_a_weight,
            of_a_buffer,
            reshaped_in_place,
            without_gradients,
        )
    },
}
STAGES: list[Directive] = [place(at(PP=0), [0]), place(at(PP=1), [1])]


def batch(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number))}


def loss(model: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    result: Tensor = model(given["x"]).sin().pow(2).mean()
    return result


def plain(form: Form) -> list[float]:
    """Train two steps in plain PyTorch: the second loss depends on the gradients of the first."""
    torch.manual_seed(0)
    model = Net(form).double()
    optimizer = sgd(model.parameters())
    losses = []
    for number in range(2):
        optimizer.zero_grad()
        result = loss(model, {"x": batch(number)["x"].double()})
        result.backward()
        optimizer.step()
        losses.append(float(result.detach()))
    return losses


def trained(form: Form, strategy: list[Directive]) -> list[float]:
    job = Job(
        model=lambda: Net(form),
        loss=loss,
        data=lambda: [batch(0)],
        strategy=strategy,
        precision="fp64",
        optimizer=sgd,
    )
    with launch_inline(compile(job)) as run:
        return [run.step(batch(number)).loss for number in range(2)]


@pytest.mark.parametrize("name", FORMS)
def test_a_view_sees_what_is_written(name: str) -> None:
    assert trained(FORMS[name], STAGES) == pytest.approx(plain(FORMS[name]), rel=1e-12)


def test_a_view_of_an_input_in_a_sharded_region_sees_what_is_written() -> None:
    form = FORMS["input: data, add"]
    strategy: list[Directive] = [shard(at(), [0, 1], axis="TP", weights={"w": 0})]
    assert trained(form, strategy) == pytest.approx(plain(form), rel=1e-12)


def test_a_view_in_another_region_is_refused() -> None:
    class Apart(Net):
        def forward(self, x: Tensor) -> Tensor:
            with annotate("PP"):
                h = self.w(x)
                row = h[0]
            with annotate("PP"):
                h.add_(1)
                result: Tensor = self.u(h) + row
            return result

    job = Job(model=lambda: Apart(both_ways), loss=loss, data=lambda: [batch(0)], strategy=STAGES)
    with pytest.raises(CaptureError, match="changed in place while another region sees it"):
        compile(job)
