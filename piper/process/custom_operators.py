"""Finds the modules that define operators, which another process imports before it runs a graph."""

import pickle
import sys
from collections.abc import Iterable

from torch import fx
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton
from torch._ops import OpOverload, OpOverloadPacket


def modules_of(graph: fx.Graph) -> set[str]:
    """Return the modules that define the operators of a graph which are not torch's own."""
    called = set()
    for node in graph.nodes:  # Dynamo leaves packets of overloads, of which tracing chooses one
        if isinstance(node.target, OpOverload):
            called.add(node.target.name().partition(".")[0])
        elif isinstance(node.target, OpOverloadPacket):
            called.add(str(node.target._qualified_op_name))
    return {module for name in called if (module := module_of(name)) is not None}


def module_of(name: str) -> str | None:
    """Return the module that defines an operator. None: it is torch's own, or no module is known.

    name: with its namespace, such as `torchvision::nms`. An operator that is written in C++ belongs to the
    package that has the name of its namespace.
    """
    if name in OPDEFS:
        return str(OPDEFS[name]._init_fn.__module__)
    kernel = singleton.find(name).fake_impl.kernel
    if kernel is not None:
        file = kernel.source.rpartition(":")[0]  # torch wraps the function, and notes where
        module = next((n for n, m in [*sys.modules.items()] if getattr(m, "__file__", None) == file), None)
        return None if module is None or module.partition(".")[0] == "torch" else module
    package = name.partition("::")[0]
    return package if package in sys.modules else None


def importable(module: str) -> bool:
    """Return whether another process can import a module by its name."""
    top = module.partition(".")[0]
    # not importlib.util.find_spec: it answers for what is loaded here, such as a recipe, however it was found
    return top != "__main__" and any(finder.find_spec(top, None) for finder in sys.meta_path)


def check_importable(modules: Iterable[str]) -> None:
    """Refuse to send code whose operators another process cannot define."""
    for module in modules:
        if not importable(module):
            raise pickle.PicklingError(f"{module} defines an operator, and no worker can import it")
