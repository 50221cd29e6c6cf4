"""No code reads a name to learn what an instruction, slot, node or bucket is: it asks for fields.

Text is cut and matched in the text forms alone. What else looks into a string is listed with its reason.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.sources import nodes_of

ROOT = Path(__file__).parents[1] / "piper"
PACKAGES = (
    "checkpoint",
    "directives",
    "ir",
    "lower",
    "plan",
    "proof",
    "runtime",
    "simulate",
    "train",
    "cli",
    "view",
)
TEXT_FORMS = {"plan/text.py", "ir/sharding.py", "ir/devices.py", "ir/ids.py", "ir/text_fields.py"}
CUTS = {
    "split",
    "rsplit",
    "partition",
    "rpartition",
    "removeprefix",
    "removesuffix",
    "lstrip",
    "find",
    "rfind",
}
LOOKS = {"startswith", "endswith", "search", "match", "fullmatch", "findall", "finditer", "sub"}
NAMES = {"arg", "bucket", "chunk", "name", "node", "slot", "title", "value"}
ALLOWED = {
    "cli/train.py": "a launcher, as it is given: rank:N",
    "checkpoint/folder.py": "names of folders",
    "checkpoint/huggingface.py": "names of tensors in somebody else's files",
    "checkpoint/json_state.py": "a type of torch's, by its name",
    "checkpoint/metadata.py": "names of files",
    "checkpoint/plain_state.py": "names of tensors in somebody else's files",
    "checkpoint/target.py": "names of folders and files",
    "directives/base.py": "the file that a directive is written in; the form of a stream's name",
    "directives/json.py": "the form of a stream's name",
    "ir/dtypes.py": "the bits in the name of a type",
    "runtime/batch.py": "a type of torch's, by its name",
    "runtime/cuda/graphs.py": "the first line of an error",
    "check/mixing.py": "an operation of torch's, by its name",
    "cli/schedule.py": "numbers that the user wrote",
    "cli/tune.py": "an amount of memory that the user wrote",
    "check/replay.py": "an operation of torch's, by its name; the files that a stack of calls goes through",
    "simulate/cluster.py": "names of files, and keys of a TOML table",
    "train/other_programs.py": "the class that an error of torch names",
    "train/run_folder.py": "names of folders",
    "cli/profile.py": "the ending of a file; microbatches shown together: `MB=*` for each in a printed name",
    "view/svg.py": "colours written in one line",
    "view/facts.py": "names that differ in their microbatch alone are sent to the page once",
    "view/report.py": "the page's template",
}


def looks_into_text(node: ast.AST) -> bool:
    """Whether an expression cuts, matches or searches a string."""
    match node:
        case ast.Call(func=ast.Attribute(attr=attr), args=args) if attr in CUTS | LOOKS:
            return not args or any(map(is_text, args)) or attr in LOOKS
        case ast.Compare(ops=[ast.In() | ast.NotIn()], left=left, comparators=[right]) if is_text(left):
            called = right.attr if isinstance(right, ast.Attribute) else getattr(right, "id", "")
            return called in NAMES
        case ast.Subscript(value=ast.Name(id=called) | ast.Attribute(attr=called), slice=ast.Slice()):
            return called in {"node", "slot", "name"}
    return False


def is_text(node: ast.expr) -> bool:
    """Whether an expression is a string, or several."""
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr():
            return True
        case ast.Tuple(elts=elts):
            return all(map(is_text, elts))
        case ast.Name(id=called):
            return called.isupper()
    return False


def found_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if looks_into_text(node):
            yield ast.unparse(node)


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_not_read_for_what_they_mean(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        where = str(path.relative_to(ROOT))
        found = list(found_in(nodes_of(path)))
        assert not found or where in TEXT_FORMS or where in ALLOWED, f"{where}: {found}"


def test_what_is_allowed_is_there() -> None:
    """A reason that nothing needs any more goes."""
    for where in ALLOWED:
        assert list(found_in(nodes_of(ROOT / where))), where


@pytest.mark.parametrize(
    "code",
    [
        "slot.partition('[')[0]",
        "ins.arg.split(' ')",
        "ins.node.startswith('R[')",
        "value.removesuffix('.again')",
        "re.search(r'din', ins.node)",
        "PHASE.search(ins.node)",
        "'.out' in slot",
        "'into loss' not in ins.node",
        "name[len(prefix):]",
    ],
)
def test_it_is_found(code: str) -> None:
    assert list(found_in(ast.walk(ast.parse(code)))) != []


@pytest.mark.parametrize("code", ["rows.split(lengths)", "part.split(block)", "'F' in phases", "devices[1:]"])
def test_other_code_is_not(code: str) -> None:
    assert list(found_in(ast.walk(ast.parse(code)))) == []
