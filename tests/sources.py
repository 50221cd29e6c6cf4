"""Files of Python as syntax trees, read once for all tests of a process that look at them: `piper/` takes two seconds."""

import ast
from functools import cache
from pathlib import Path

from piper.process.gc_pause import no_collection


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file. The caller changes nothing in it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, those of a level before those inside them."""
    with no_collection():
        return tuple(ast.walk(tree_of(path)))
