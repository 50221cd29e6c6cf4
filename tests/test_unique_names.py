"""One word, one meaning: class names and module names of `piper/` that are used more than once have a reason here."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.sources import nodes_of

ROOT = Path(__file__).parents[1] / "piper"
VERBS = "cli"  # its files are named after the verbs of the command line
CLASSES = {
    "Replicate": "the directive, and the placement of a tensor, as DTensor calls it",
    "Shard": "the directive, and the placement of a tensor, as DTensor calls it",
    "Config": "users write decoder.Config and moe.Config: one for each model, with the same role",
}
MODULES = {
    "base": "the protocol or base class of a package",
    "huggingface": "models from Hugging Face, and checkpoints of theirs",
    "inline": "the launcher of threads in one process, and the communicator of that launcher",
    "remat": "the directive, and the choice of saved values that it asks for",
}


def class_names(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield every class of a tree with the file that defines it."""
    for path in sorted(root.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                yield node.name, str(path.relative_to(root))


def module_names(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Yield every module of a tree with its file. `__init__` and the verbs are left out."""
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root)
        if path.stem not in ("__init__", "__main__") and where.parts[0] != VERBS:
            yield path.stem, str(where)


def repeated(found: Iterator[tuple[str, str]]) -> Mapping[str, list[str]]:
    """Return the names that occur more than once, with their files."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, where in found:
        places[name].append(where)
    return {name: files for name, files in places.items() if len(files) > 1}


def test_a_class_name_is_used_once() -> None:
    found = repeated(class_names())
    assert sorted(found) == sorted(CLASSES), {name: found.get(name) for name in found.keys() ^ CLASSES.keys()}


def test_a_module_name_is_used_once() -> None:
    found = repeated(module_names())
    assert sorted(found) == sorted(MODULES), {name: found.get(name) for name in found.keys() ^ MODULES.keys()}


def test_a_repeated_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "one.py").write_text("class First: ...\nclass Twice: ...\n", encoding="utf-8")
    (tmp_path / "a" / "one.py").write_text("class Outer:\n    class Twice: ...\n", encoding="utf-8")
    assert repeated(class_names(tmp_path)) == {"Twice": ["a/one.py", "one.py"]}
    assert repeated(module_names(tmp_path)) == {"one": ["a/one.py", "one.py"]}
