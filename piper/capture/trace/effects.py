"""Finds the side effects of operations of the captured graph: writes and random numbers."""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.node import Argument
from torch.utils._pytree import tree_leaves

# By identity: `operator.and_` has a name that ends as those of torch's writes do, and writes nothing
_OPERATORS = frozenset(function for function in vars(operator).values() if callable(function))
# Not `imatmul`: a tensor has no such method, so `x @= y` makes a new one
_ASSIGNS = re.compile(r"i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)|setitem")
_NOT_WRITES = ("requires_grad_", "detach_")  # change what autograd sees of a tensor, not its elements
_DRAWS = re.compile(
    r"rand|randn|randint|randperm|rand_like|randn_like|randint_like|bernoulli_?|multinomial|normal_?|poisson|"
    r"binomial|rrelu|gumbel_softmax|uniform_|exponential_|random_|cauchy_|geometric_|log_normal_"
)
_POSITIONS = {  # of arguments of built-in functions, which have no signature
    ("scaled_dot_product_attention", "dropout_p"): 4,
    ("batch_norm", "running_mean"): 3,
    ("batch_norm", "running_var"): 4,
    ("batch_norm", "training"): 5,
    ("dropout", "p"): 1,
    ("dropout", "training"): 2,
}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_DROPS = re.compile(r"(alpha_|feature_alpha_|native_)?dropout[123]?d?")


def store(target: torch.Tensor, index: object, value: object) -> torch.Tensor:
    """Assign to an index and return the tensor, so that later reads can depend on the assignment."""
    target[index] = value  # type: ignore[index,assignment]
    return target


def name_of(node: fx.Node) -> str:
    """Return the plain name of the function that a node calls: `linear`, `add_`."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def writes(node: fx.Node) -> Sequence[fx.Node]:
    """Return the values that a node changes in place."""
    if node.op not in ("call_function", "call_method"):
        return ()
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        pairs = zip(schema.arguments, node.args, strict=False)
        named = ((spec, node.kwargs.get(spec.name)) for spec in schema.arguments)
        hit = [value for spec, value in [*pairs, *named] if spec.alias_info and spec.alias_info.is_write]
        return [value for value in hit if isinstance(value, fx.Node)]
    written: list[object] = [node.kwargs.get("out")]
    if _writes_first(node) or node.target is store or argument(node, "inplace", False):
        written.append(node.args[0] if node.args else next(iter(node.all_input_nodes)))
    if node.target in (F.batch_norm, torch.batch_norm) and argument(node, "training", False):
        written += [argument(node, "running_mean"), argument(node, "running_var")]
    if node.target is F.instance_norm and argument(node, "use_input_stats", True):
        written += [argument(node, "running_mean"), argument(node, "running_var")]
    if node.target in (F.embedding, F.embedding_bag) and argument(node, "max_norm") is not None:
        written.append(argument(node, "weight"))
    return [value for value in tree_leaves(written) if isinstance(value, fx.Node)]


def _writes_first(node: fx.Node) -> bool:
    """Return whether a node calls a function or method that writes its first argument, by its name."""
    name = name_of(node)
    if node.target in _OPERATORS or name.endswith("__"):  # `iadd` and `__iadd__`
        return _ASSIGNS.fullmatch(name.strip("_")) is not None
    return name.endswith("_") and name not in _NOT_WRITES


def draws(node: fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        if node.target is torch.ops.aten.dropout.default:
            return bool(node.args[1]) and bool(node.args[2])
        if not is_tagged(node.target, torch.Tag.nondeterministic_seeded):
            return False
        drops = "dropout_p" in _parameters(node.target)  # attention draws only if it drops
        return not drops or bool(argument(node, "dropout_p"))
    name = name_of(node)
    if _DROPS.fullmatch(name):
        return bool(argument(node, "training", True)) and bool(argument(node, "p", 0.5))
    if name == "scaled_dot_product_attention":
        return bool(argument(node, "dropout_p", 0.0))
    if name in _RECURRENT:
        return _drops_between_layers(node)
    return _DRAWS.fullmatch(name) is not None


def _drops_between_layers(node: fx.Node) -> bool:
    """Return whether a recurrent network drops values between its layers."""
    # The arguments are data, batch sizes, state, weights, or input, state, weights. They end with num_layers,
    # dropout, training, bidirectional and, for unpacked input, batch_first.
    packed = isinstance(node.args[3], tuple | list)
    dropout, training = node.args[6:8] if packed else node.args[5:7]
    return bool(training) and bool(dropout != 0.0)


def argument(node: fx.Node, name: str, default: Argument = None) -> Argument:
    """Return an argument by name, passed by position or by keyword; else ATen's default, or the given one."""
    if name in node.kwargs:
        return node.kwargs[name]
    known: Mapping[str, Argument] = {}
    if inspect.isfunction(node.target) or isinstance(node.target, torch._ops.OpOverload):
        known = _parameters(node.target)
        position = [*known].index(name) if name in known else len(node.args)
    else:
        position = _POSITIONS.get((name_of(node), name), len(node.args))
    if position < len(node.args):
        return node.args[position]
    return default if known.get(name) is None else known[name]


@functools.cache
def _parameters(function: Callable[..., object]) -> Mapping[str, Argument]:
    """Return the parameters of a function in order, with the defaults of an operation of ATen."""
    if isinstance(function, torch._ops.OpOverload):
        return {each.name: each.default_value for each in function._schema.arguments}
    return dict.fromkeys(inspect.signature(function).parameters)


@functools.cache  # a graph of many layers asks for few operators many times
def is_tagged(target: torch._ops.OpOverload, tag: torch.Tag) -> bool:
    """Return whether torch marks an operator so."""
    return tag in target.tags
