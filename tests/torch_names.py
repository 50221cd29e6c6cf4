"""The private names of torch that `piper/` reads: gather them, and verify that the running torch has them.

Private parts of torch come and go between versions without notice, and the default tests run with the newest
supported version only. So `torch_names.txt` lists the private names that `piper/` may read. It is written where the
oldest supported torch runs, and only if that has them all: `make torch-names`. The default tests compare it with the
code, and verify it with the newest version.

    python -m tests.torch_names            does the running torch have every private name that piper/ reads?
    python -m tests.torch_names --write    the same, and write the list (with the oldest supported torch)

Only names that can be followed from an import are seen. What is read on a value, as in `loaded._compiled_fn`, is left
to mypy and to the tests of `make oldest`.
"""

import ast
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path

from tests.sources import tree_of

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".txt")
HEADER = "# The private names of torch that piper/ reads. `make torch-names` verifies and writes this file.\n"


def oldest_torch() -> str:
    """Return the oldest supported version of torch, which pyproject.toml states: `2.11`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [re.match(r"torch>=([\d.]+)", each) for each in project["dependencies"]]
    return next(each[1] for each in found if each is not None)


def names_of_piper() -> set[str]:
    """Return the private names of torch that the files of `piper/` read."""
    paths = [
        path for path in sorted((ROOT / "piper").rglob("*.py")) if "torch" in path.read_text(encoding="utf-8")
    ]
    return longest(name for path in paths for name in private_names(tree_of(path)))


def listed_names() -> set[str]:
    """Return the names in the list."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def longest(names: Iterable[str]) -> set[str]:
    """Return the names that are no beginning of another one: `torch._ops.OpOverload` includes `torch._ops`."""
    found = set(names)
    return found - {short for name in found for short in beginnings(name)}


def beginnings(name: str) -> list[str]:
    """Return what a name is within: `torch` and `torch._ops` for `torch._ops.OpOverload`."""
    return list(accumulate(name.split(".")[:-1], lambda owner, attr: f"{owner}.{attr}"))


def private_names(tree: ast.Module) -> set[str]:
    """Return the private names of torch that a file reads, without those that it asks for with `hasattr`."""
    nodes = [*ast.walk(tree)]
    bound = {short: name for node in nodes for short, name in imported(node)}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=short)], value=value) if name := dotted(value, bound):
                bound[short] = name  # aten = torch.ops.aten
    found = {*bound.values(), *(name for node in nodes for name in read_in(node, bound))}
    tried = {name for node in nodes for name in tried_in(node, bound)}
    return {name for name in found if is_private(name) and not tried & {name, *beginnings(name)}}


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield what an import of torch binds: `("F", "torch.nn.functional")`."""
    match node:
        case ast.Import(names=names):
            for each in names:
                if each.name.partition(".")[0] == "torch":
                    yield (each.asname, each.name) if each.asname else ("torch", "torch")
        case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "torch":
            for each in names:
                yield each.asname or each.name, f"{module}.{each.name}"


def dotted(node: ast.AST, bound: Mapping[str, str]) -> str | None:
    """Return the full name that an expression reads. None: it does not begin with a name bound to torch."""
    match node:
        case ast.Name(id=short):
            return bound.get(short)
        case ast.Attribute(value=value, attr=attr):
            owner = dotted(value, bound)
            return owner and f"{owner}.{attr}"
    return None


def read_in(node: ast.AST, bound: Mapping[str, str]) -> Iterator[str]:
    """Yield the names that one node reads: attributes, those named by a string, and settings of a `config`."""
    match node:
        case ast.Attribute() if name := dotted(node, bound):
            yield name
        case (
            ast.Call(func=ast.Name(id="replaced"), args=[owner, ast.Constant(value=str(attr)), _])
            | ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(attr))])
        ) if name := dotted(owner, bound):
            yield f"{name}.{attr}"
        case ast.Call(func=ast.Attribute(value=owner, attr="patch"), keywords=keywords) if name := dotted(
            owner, bound
        ):
            yield from (f"{name}.{each.arg}" for each in keywords if each.arg)


def tried_in(node: ast.AST, bound: Mapping[str, str]) -> Iterator[str]:
    """Yield the name that `hasattr` asks for: the file has a way without it."""
    match node:
        case ast.Call(func=ast.Name(id="hasattr"), args=[owner, ast.Constant(value=str(attr))]) if (
            name := dotted(owner, bound)
        ):
            yield f"{name}.{attr}"


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def missing(names: Iterable[str]) -> list[str]:
    """Return the names that the running torch does not have."""
    import_module("torch.nn.attention.varlen")  # registers an operator that piper/ names
    return sorted(name for name in names if not is_there(name))


def is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    """Verify the names with the running torch, and write them if asked: 0 if it has all of them."""
    import torch

    names, oldest, running = names_of_piper(), oldest_torch(), torch.__version__
    if absent := missing(names):
        sys.stderr.write("".join(f"torch {running} has no {name}\n" for name in absent))
        return 1
    if "--write" in arguments:
        if not running.startswith(f"{oldest}."):
            sys.stderr.write(
                f"torch {running} runs here, and the list is written with {oldest}: make torch-names\n"
            )
            return 1
        LIST.write_text(HEADER + "".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")
    sys.stdout.write(f"torch {running} has the {len(names)} private names that piper/ reads\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
