"""What an operation of the captured graph does besides computing its result: writes, random numbers, markers."""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import fx

Marker = Literal["route", "unroute"]

_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in "iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor setitem".split()
)
_NOT_WRITES = ("requires_grad_", "detach_", "retain_grad")  # change how a tensor is seen, not what it holds
_DRAWS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal poisson binomial "
    "rrelu gumbel_softmax bernoulli_ uniform_ normal_ exponential_ random_ cauchy_ geometric_ log_normal_".split()
)
_DROPS = frozenset("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout native_dropout".split())


def store(target: torch.Tensor, index: object, value: object) -> torch.Tensor:
    """Assign to an index and return the tensor, so that what reads it later can say so."""
    target[index] = value  # type: ignore[index,assignment]
    return target


def name_of(node: fx.Node) -> str:
    """The plain name of what a node calls: `linear`, `add_`."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def marker(node: fx.Node) -> Marker | None:
    """Whether a node is the beginning or the end of an expert region."""
    if node.op == "call_function":
        name = str(node.target)  # by name: the operations live outside this package
        if name in ("piper.route.default", "piper.route"):
            return "route"
        if name in ("piper.unroute.default", "piper.unroute"):
            return "unroute"
    return None


def writes(node: fx.Node) -> Sequence[fx.Node]:
    """The values that a node changes in place."""
    if node.op not in ("call_function", "call_method"):
        return ()
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        pairs = zip(schema.arguments, node.args, strict=False)
        named = ((spec, node.kwargs.get(spec.name)) for spec in schema.arguments)
        hit = [value for spec, value in [*pairs, *named] if spec.alias_info and spec.alias_info.is_write]
        return [value for value in hit if isinstance(value, fx.Node)]
    name = name_of(node)
    written: list[object] = [node.kwargs.get("out")]
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NOT_WRITES
    if in_place or node.target in _IN_PLACE or node.target is store or argument(node, "inplace", False):
        written.append(node.args[0])
    if node.target in (F.batch_norm, torch.batch_norm) and argument(node, "training", False):
        written += [argument(node, "running_mean"), argument(node, "running_var")]
    if node.target is F.instance_norm and argument(node, "use_input_stats", True):
        written += [argument(node, "running_mean"), argument(node, "running_var")]
    return [value for value in written if isinstance(value, fx.Node)]


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags
    name = name_of(node)
    if name in _DROPS:
        return bool(argument(node, "training", True)) and argument(node, "p", 0.5) != 0.0
    if name == "scaled_dot_product_attention":
        return argument(node, "dropout_p", 0.0) != 0.0
    return name in _DRAWS


def argument(node: fx.Node, name: str, default: object = None) -> object:
    """An argument of a Python function by name, however it was passed."""
    if name in node.kwargs:
        return node.kwargs[name]
    if not inspect.isfunction(node.target):
        return _BUILTIN_ARGUMENTS.get((name_of(node), name), lambda args: default)(node.args)
    names = _parameters(node.target)
    position = names.index(name) if name in names else len(node.args)
    return node.args[position] if position < len(node.args) else default


@functools.cache
def _parameters(function: Callable[..., object]) -> Sequence[str]:
    return tuple(inspect.signature(function).parameters)


# Built-in functions have no signature to ask.
_BUILTIN_ARGUMENTS = {
    ("scaled_dot_product_attention", "dropout_p"): lambda args: args[4] if len(args) > 4 else 0.0,
    ("batch_norm", "running_mean"): lambda args: args[3],
    ("batch_norm", "running_var"): lambda args: args[4],
    ("batch_norm", "training"): lambda args: args[5],
    ("dropout", "p"): lambda args: args[1],
    ("dropout", "training"): lambda args: args[2],
}
