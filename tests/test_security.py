"""Where piper reads what can run code: nowhere but where docs/security.md says."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.sources import nodes_of, tree_of

PACKAGE = Path(__file__).parents[1] / "piper"
READERS = {"pickle", "cloudpickle", "_pickle", "dill", "joblib", "marshal", "shelve", "yaml", "pandas"}
LOADS = {"load", "loads", "Unpickler", "open", "read_pickle", "unsafe_load"}
EXACT = {
    "torch.load",
    "np.load",
    "numpy.load",
    "CompiledArtifact.load",
    "GraphPickler.loads",
    "torch.compiler.load_cache_artifacts",
}
ALLOWED = {
    (
        "workers/transport/serialize.py",
        "unpack",
        "pickle.loads",
    ),  # functions of the job, from the worker's own driver
    (
        "capture/compile/inductor.py",
        "_load",
        "CompiledArtifact.load",
    ),  # what the cache has verified, or this process made
    # Through pipes between a process and the processes that it starts to compile, which nothing else can open.
    ("capture/compile/servers.py", "_drive", "pickle.load"),
    ("capture/compile/servers.py", "serve", "pickle.load"),
    ("capture/compile/servers.py", "compile_request", "GraphPickler.loads"),
    ("tuning/forked_calls.py", "result", "pickle.loads"),  # from a process that this one forked
    # Files of other programs: tensors, numbers, text and containers alone.
    ("checkpoint/dcp.py", "_stored", "torch.load"),
    ("train/other_programs.py", "torch_source", "torch.load"),
}
RUN = {
    ("workers/transport/serialize.py", "__init__", "exec"),  # captured code, of what `unpack` has read
}


def dotted(node: ast.expr) -> str:
    """Return an expression as `ast.unparse` writes it, which takes ten times as long for a dotted name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=owner, attr=name):
            return f"{dotted(owner)}.{name}"
    return ast.unparse(node)


@cache
def calls(path: Path) -> tuple[tuple[str, str], ...]:
    """Every call in a file: the function that it stands in, and the dotted name of what it calls."""

    def visit(node: ast.AST, inside: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, ast.FunctionDef) else inside
            if isinstance(child, ast.Call):
                yield inside, dotted(child.func)
            yield from visit(child, name)

    return tuple(visit(tree_of(path), ""))


def found(wanted: set[str]) -> set[tuple[str, str, str]]:
    return {
        (path.relative_to(PACKAGE).as_posix(), inside, called)
        for path in PACKAGE.rglob("*.py")
        for inside, called in calls(path)
        if called in wanted
    }


def loads(called: str) -> bool:
    module, _, name = called.rpartition(".")
    return called in EXACT or (module.split(".")[0] in READERS and name in LOADS)


def test_nothing_else_unpickles() -> None:
    unpickling = {
        (path.relative_to(PACKAGE).as_posix(), inside, called)
        for path in PACKAGE.rglob("*.py")
        for inside, called in calls(path)
        if loads(called)
    }
    assert unpickling == ALLOWED


def test_torch_loads_weights_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
                assert "weights_only=True" in [ast.unparse(word) for word in node.keywords], path


def test_one_unpickler_knows_its_records_alone() -> None:
    """It refuses every other name: tests/checkpoint/test_moved.py."""
    unpicklers = {
        (path.relative_to(PACKAGE).as_posix(), node.name)
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(base) for base in node.bases)
    }
    assert unpicklers == {("checkpoint/dcp.py", "MetadataUnpickler")}


def test_no_name_of_a_reader_is_imported_by_itself() -> None:
    """`from pickle import loads` would hide from the test above."""
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert node.module.split(".")[0] not in READERS, path
            if isinstance(node, ast.Import):
                assert all(alias.asname is None for alias in node.names if alias.name in READERS), path


def test_unpickled_functions_come_from_a_setup_or_a_call_of_the_self_test() -> None:
    """A setup is what a worker is given by its driver, over a channel that both have proved their key on."""
    users = {(where, inside) for where, inside, _ in found({"unpack"})}
    calls = (
        "selftest/rank_process.py",
        "main",
    )  # from the process that forked this one, over a pair of sockets
    assert users == {("workers/messages.py", "unpack_setup"), calls}
    builders = {(where, inside) for where, inside, _ in found({"unpack_setup"})}
    # the programs that train and that evaluate
    assert builders == {("workers/serve.py", "__init__"), ("workers/serve.py", "prepare")}


def test_code_is_run_from_text_nowhere_else() -> None:
    assert found({"exec", "eval"}) == RUN


def test_no_object_goes_through_a_store_or_a_pickled_collective() -> None:
    pickled = {
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "scatter_object_list",
        "send_object_list",
    }
    assert not found(pickled | {f"dist.{name}" for name in pickled})
    assert not found({"multiprocessing.connection.Listener", "multiprocessing.connection.Client", "Pipe"})
