"""Forward hooks are part of the forward; hooks on gradients are refused, whoever registers them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import cleandoc

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

from piper.capture.trace.annotate import annotate
from piper.errors import CaptureError
from tests import zoo
from tests.runtime.against_plain import difference
from tests.runtime.against_plain import refusal as compile_refusal

BUT = "it would see the gradient of one slice of the samples, not the sum over the batch"
HINT = (
    "put the change into the optimizer's step, clip with clip_norm of Job, or write a torch.autograd.Function "
    "whose backward changes the gradient"
)


class Two(nn.Module):
    """Two stages; the test may register hooks in the constructor or the forward."""

    def __init__(self, register: Callable[["Two"], object] = id, within: Callable[..., object] = id) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
        self.within = within
        register(self)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = torch.tanh(self.a(x))
            if self.within is not id:
                self.within(self, h)
        with annotate("PP"):
            result: Tensor = self.b(h)
        return result


def double(gradient: Tensor) -> Tensor:
    return 2 * gradient


def refusal(model: Callable[[], nn.Module]) -> str:
    return compile_refusal(CaptureError, model, zoo.regression, zoo.vectors)


@pytest.mark.parametrize(
    ("register", "who", "what"),
    [
        (lambda m: m.a.weight.register_hook(double), "the parameter a.weight", "register_hook"),
        (
            lambda m: m.b.bias.register_post_accumulate_grad_hook(double),
            "the parameter b.bias",
            "register_post_accumulate_grad_hook",
        ),
        (lambda m: m.b.register_full_backward_hook(double), "the module b", "register_full_backward_hook"),
        (
            lambda m: m.register_full_backward_pre_hook(double),
            "the model",
            "register_full_backward_pre_hook",
        ),
        (lambda m: m.a.register_backward_hook(double), "the module a", "register_full_backward_hook"),
    ],
)
def test_hooks_of_the_constructor(register: Callable[[Two], object], who: str, what: str) -> None:
    def model() -> Two:
        return Two(register)

    line = double.__code__.co_firstlineno
    assert refusal(model) == cleandoc(f"""
        model (test_hooks.py:{model.__code__.co_firstlineno}): {who} has a hook on its gradient
          hook: {what}(double (test_hooks.py:{line}))
          but:  {BUT}
          hint: {HINT}
    """)


def test_a_hook_that_never_runs_is_no_matter() -> None:
    def freeze(model: Two) -> None:
        model.a.weight.register_hook(double)
        model.a.weight.requires_grad_(False)

    assert difference(lambda: Two(freeze), zoo.regression, zoo.vectors) < 1e-12


@pytest.mark.parametrize(
    ("within", "who", "what"),
    [
        (lambda m, h: m.a.weight.register_hook(double), "the parameter a.weight", "register_hook"),
        (
            lambda m, h: m.b.bias.register_post_accumulate_grad_hook(double),
            "the parameter b.bias",
            "register_post_accumulate_grad_hook",
        ),
        (lambda m, h: h.register_hook(double), "a value of the forward", "register_hook"),
    ],
)
def test_hooks_of_the_forward(within: Callable[..., object], who: str, what: str) -> None:
    line = within.__code__.co_firstlineno
    message = refusal(lambda: Two(within=within))
    assert message == cleandoc(f"""
        model (test_hooks.py:{line}): {who} has a hook on its gradient
          hook: {what}(...)
          but:  {BUT}
          hint: {HINT}
    """)
    assert refusal(lambda: Two(within=within)) == message  # what a trace replaces is put back


@pytest.mark.parametrize(
    "within",
    [
        lambda m, h: h.retain_grad(),
        lambda m, h: h.grad_fn.register_hook(double),
        lambda m, h: torch.autograd.graph.register_multi_grad_hook([h, m.a.weight], print),
        lambda m, h: torch.autograd.graph.saved_tensors_hooks(double, double).__enter__(),
        lambda m, h: m.b.register_full_backward_hook(double),
    ],
    ids=["retain_grad", "grad_fn", "multi_grad", "saved_tensors", "module"],
)
def test_other_hooks_of_the_forward(within: Callable[..., object]) -> None:
    assert refusal(lambda: Two(within=within))


@contextmanager
def registered(handle: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook"])
def test_backward_hooks_of_every_module(kind: str) -> None:
    with registered(getattr(modules, f"register_module_{kind}")(double)):
        message = refusal(Two)
    line = double.__code__.co_firstlineno
    assert message.splitlines()[:2] == [
        "model (test_hooks.py:26): every module has a hook on its gradient",
        f"  hook: register_module_{kind}(double (test_hooks.py:{line}))",
    ]


def twice(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return 2 * output


def half(_module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] / 2,)


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.a.register_forward_hook(twice),
        lambda m: m.b.register_forward_pre_hook(half),
        lambda m: m.a.register_forward_hook(twice, always_call=True),
        lambda m: m.a.register_forward_hook(lambda _m, _a, _k, output: 3 * output, with_kwargs=True),
    ],
    ids=["forward", "pre", "always", "kwargs"],
)
def test_forward_hooks_run(register: Callable[[Two], object]) -> None:
    assert difference(lambda: Two(register), zoo.regression, zoo.vectors) < 1e-12


def test_forward_hooks_of_every_module_run() -> None:
    def only_linear(module: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        return twice(module, inputs, output) if isinstance(module, nn.Linear) else None

    with registered(modules.register_module_forward_hook(only_linear)):  # type: ignore[arg-type]
        assert difference(Two, zoo.regression, zoo.vectors) < 1e-12


def test_hooks_of_a_state_dict_are_no_matter() -> None:
    def register(model: Two) -> None:
        model.register_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
        model.register_state_dict_post_hook(lambda *_: None)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(lambda *_: None)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(lambda *_: None)  # type: ignore[no-untyped-call]

    assert difference(lambda: Two(register), zoo.regression, zoo.vectors) < 1e-12


class Reversed(torch.autograd.Function):
    """What a user writes instead of a hook: the gradient changes sign on its way back."""

    @staticmethod
    def forward(_context: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: object, gradient: Tensor) -> Tensor:
        return -gradient


def test_a_function_of_autograd_changes_gradients() -> None:
    class Adversarial(Two):
        def forward(self, x: Tensor) -> Tensor:
            with annotate("PP"):
                h = torch.tanh(self.a(x))
            with annotate("PP"):
                result: Tensor = self.b(Reversed.apply(h))  # type: ignore[no-untyped-call]
            return result

    assert difference(Adversarial, zoo.regression, zoo.vectors) < 1e-12
