"""Which package may import which. To add an arrow, change this table and say why in the review."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import nodes_of

ROOT = Path(__file__).parents[1] / "piper"
PACKAGES = {
    "callbacks",
    "capture",
    "check",
    "checkpoint",
    "data",
    "directives",
    "errors",
    "experts",
    "ir",
    "job",
    "run",
    "losses",
    "lower",
    "models",
    "plan",
    "process",
    "proof",
    "recipe",
    "workers",
    "runtime",
    "schedules",
    "simulate",
    "strategies",
    "version",
    "view",
}
MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "process": {"errors", "torch"},  # torch: its library of operators
    "ir": {"errors"},
    "plan": {"errors", "ir"},  # ir: devices, slots, how tensors are sharded
    "directives": {"errors", "ir"},
    "schedules": {"errors", "ir", "directives"},
    "strategies": {"directives", "errors", "ir", "schedules"},
    "lower": {"errors", "ir", "plan", "process", "proof"},
    "proof": {"ir", "plan"},
    "simulate": {"errors", "ir", "plan", "process", "version"},
    "view": {
        "errors",
        "ir",
        "plan",
        "process",
        "schedules",
        "simulate",
        "version",
    },  # simulate: when things happen
    "experts": {"errors", "torch"},
    "losses": {"capture", "errors", "torch"},  # capture: the operators of the head
    "callbacks": {"errors", "process", "torch"},
    "capture": {"errors", "ir", "process", "torch"},
    "models": {"losses", "errors", "experts", "capture", "torch"},
    "job": {"callbacks", "directives", "errors", "ir", "process", "torch"},
    "recipe": {"errors", "job", "process"},
    "runtime": {"callbacks", "errors", "ir", "job", "plan", "process", "torch"},  # callbacks: a job has some
    "check": {"callbacks", "directives", "errors", "ir", "job", "plan", "process", "runtime", "torch"},
    "checkpoint": {"errors", "ir", "plan", "runtime", "torch", "version"},
    "data": {"errors", "process", "torch"},
    "workers": {
        "checkpoint",
        "errors",
        "experts",  # code calls its operators
        "ir",
        "job",
        "plan",
        "process",
        "ray",
        "runtime",
        "simulate",  # how long a network takes
        "torch",
    },
    "run": {
        "callbacks",
        "checkpoint",
        "data",  # the batches of the training loop
        "errors",
        "ir",
        "job",
        "plan",
        "process",
        "runtime",
        "simulate",  # where experts are best computed
        "torch",
        "workers",
    },
    "compiler": PACKAGES | {"torch"},
    "train": PACKAGES | {"compiler", "torch"},  # the run folder and the display around the loop
    "tuning": PACKAGES | {"compiler", "torch"},  # compiles candidates
    "selftest": PACKAGES | {"compiler", "torch"},  # whole jobs, and torch beside them
    "cli": PACKAGES | {"compiler", "selftest", "train", "tuning", "torch", "__init__"},
    "__init__": PACKAGES | {"compiler", "tuning"},
    "__main__": {"cli"},
}
# Inside a package: which of its subpackages and modules may import which. "." is every module without a row.
INSIDE: dict[str, dict[str, set[str]]] = {
    "capture": {
        "trace_errors": set(),
        "quirks": {"trace_errors"},
        "trace": {"quirks", "trace_errors"},
        "shard": {"quirks", "trace", "trace_errors"},
        "precision": {"trace"},
        "compile": {"trace", "trace_errors"},
        "cost": {"precision", "trace"},
        "autodiff": {"compile", "cost", "precision", "quirks", "trace", "trace_errors"},
        "recordings": {"autodiff", "compile", "shard", "trace"},
        "layers": {"autodiff", "recordings", "shard", "trace"},
    },
    "runtime": {"comm": {"."}, "cuda": {".", "comm"}},
    "workers": {"transport": {"."}},
}
PURE = (
    "ir",
    "plan",
    "directives",
    "schedules",
    "lower",
    "simulate",
    "view",
)  # readable anywhere, in milliseconds
WATCHED = {"torch", "ray"}  # third parties that only some packages may import
RAY = {"workers/ray.py"}  # may import ray


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One name that a file takes from another package or from a watched package."""

    package: str  # or watched package
    module: str
    name: str  # "" for `import module`


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return what a file imports of ours and of the packages that are watched."""
    return tuple(imported(nodes_of(path)))


def imported(nodes: Iterable[ast.AST]) -> Iterator[Import]:
    for node in nodes:
        pairs: list[tuple[str, str]] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            pairs = [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            pairs = [(alias.name, "") for alias in node.names]
        for module, name in pairs:
            top, _, rest = module.partition(".")
            if top == "piper":
                yield Import(package=rest.split(".")[0] or name or "__init__", module=module, name=name)
            elif top in WATCHED:
                yield Import(package=top, module=module, name=name)


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_reads(path: Path) -> Iterator[str]:
    """Each `module._name` where module is one of ours: the same as importing `_name`, in disguise."""
    nodes = nodes_of(path)
    modules = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "piper"
        for alias in node.names
        if is_module(f"{node.module}.{alias.name}")
    }
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules and private(name):
                yield f"{module}.{name}"


def is_module(dotted: str) -> bool:
    path = ROOT.parent.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def files_of(package: str) -> list[Path]:
    folder, file = ROOT / package, ROOT / f"{package}.py"
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [file] if file.exists() else []


def all_files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def test_every_package_is_in_the_table() -> None:
    packages = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in all_files()}
    assert packages <= set(MAY_IMPORT), "say here what a new package may import"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_follow_the_layers(package: str) -> None:
    files = [*files_of(package)]
    assert files, "the table has a package that is not there"
    for path in files:
        for found in imports(path):
            where = f"{path.relative_to(ROOT)} imports {found.name or '*'} from {found.module}"
            assert found.package in MAY_IMPORT[package] | {package}, where


def member(package: str, parts: Sequence[str]) -> str:
    """Return the row of a package's table to which one of its modules belongs."""
    name = parts[0].removesuffix(".py") if parts else "."
    return name if name in INSIDE[package] else "."


@pytest.mark.parametrize("package", INSIDE)
def test_imports_inside_a_package_follow_its_table(package: str) -> None:
    rows = INSIDE[package]
    for path in files_of(package):
        own = member(package, path.relative_to(ROOT / package).parts)
        if own == ".":
            continue
        inner = [m.split(".") for m in imported_modules(path) if m.startswith(f"piper.{package}.")]
        for _, _, *parts in inner:
            where = f"{path.relative_to(ROOT)} imports {'.'.join(parts)}"
            assert member(package, parts) in rows[own] | {own}, where


@pytest.mark.parametrize("package", INSIDE)
def test_the_table_of_a_package_names_all_of_its_subpackages_and_has_no_circle(package: str) -> None:
    rows = INSIDE[package]
    inside = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert inside <= set(rows), "say here what a new subpackage may import"
    assert all((ROOT / package / name).is_dir() or (ROOT / package / f"{name}.py").exists() for name in rows)
    TopologicalSorter({name: allowed - {"."} for name, allowed in rows.items()}).prepare()


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the modules of piper that a module imports: at once, late, or for types alone."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if is_module(inner) else node.module


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not through modules in between either, and imports that are late or for types alone count."""
    graph = {}
    for path in all_files():
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = set(imported_modules(path)) - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(reversed(error.args[1]))}")


def test_private_names_stay_in_their_module() -> None:
    for path in all_files():
        taken = [f.name for f in imports(path) if f.module.startswith("piper") and private(f.name)]
        assert not [*taken, *private_reads(path)], path.relative_to(ROOT)


def test_only_the_launcher_imports_ray() -> None:
    users = {
        str(path.relative_to(ROOT)) for path in all_files() if any(f.package == "ray" for f in imports(path))
    }
    assert users == RAY


def test_pure_packages_run_without_torch() -> None:
    modules = [".".join(p.relative_to(ROOT.parent).with_suffix("").parts) for r in PURE for p in files_of(r)]
    assert len(modules) > 50
    program = f"import sys\nfor name in {modules}: __import__(name)\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, timeout=30, capture_output=True)
    assert done.returncode == 0, done.stderr.decode() or "a pure package brings in torch"
