"""The first lines of all errors that users can see, read off the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.sources import nodes_of

RAISING = {  # the call, and which of its arguments may say what is wrong
    "CaptureError": (0,),
    "ConfigError": (0,),
    "UndroppedError": (0,),
    "UnwrittenError": (0,),
    "LaunchError": (0,),
    "RefusedError": (0,),
    "ScheduleError": (0,),
    "WorkerError": (0,),
    "file_errors": (0,),
    "need": (1,),
    "raised": (0,),
    "refused": (0, 1),
    "telling": (0,),
    "user_errors": (1,),
}


def messages(package: Path) -> dict[str, str]:
    """Every message with where it stands; what differs from case to case is `…`."""
    found: dict[str, str] = {}
    for path in sorted(package.rglob("*.py")):
        variables = assigned(path)
        for node in nodes_of(path):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            for place in RAISING.get(node.func.id, ()):
                given = node.args[place] if place < len(node.args) else ast.Constant(value=None)
                for text in [text for one in variables.get(given, [given]) for text in texts(one)]:
                    if " " in text or "=" in text or node.func.id != "refused":  # which also names its verb
                        found.setdefault(text, f"{path.relative_to(package)}:{node.lineno}")
    return found


def assigned(path: Path) -> dict[ast.expr, list[ast.expr]]:
    """What each argument that is a variable may be: all that is assigned to it in the function of the call."""
    found: dict[ast.expr, list[ast.expr]] = {}
    for function in nodes_of(path):
        if not isinstance(function, ast.FunctionDef):
            continue
        values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                values.setdefault(node.targets[0].id, []).append(node.value)
        calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
        for one in (one for call in calls for one in call.args if isinstance(one, ast.Name)):
            if one.id in values:
                found[one] = values[one.id]
    return found


def texts(said: ast.expr) -> Iterator[str]:
    """What an expression can say, where it says so itself."""
    match said:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            parts = (str(v.value) if isinstance(v, ast.Constant) else "…" for v in values)
            yield "".join(parts)
        case ast.IfExp(body=body, orelse=other):
            yield from texts(body)
            yield from texts(other)
