"""Loads a recipe, `file.py:function`, and returns its job."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import cast

from piper.errors import ConfigError, PiperError
from piper.job import Job
from piper.process.usercode import defined_at, said, users_frames

MOST = 16  # functions of a file that are listed


def file_and_function(spec: str) -> tuple[str, str]:
    """Return the file and the function that a recipe is given as: `file.py:function`."""
    file, _, function = spec.rpartition(":")
    return file, function


def load_recipe(spec: str, strategy: Path | None = None) -> Job:
    """Import a recipe's file and call its function. strategy: a JSON file that takes its strategy's place."""
    file, name = file_and_function(spec)
    if not file or not name:
        hint = "name the file and the function: piper plan recipes/dense.py:pp"
        raise ConfigError("this is not a recipe", by=spec, hint=hint)
    path = Path(file)
    if not path.is_file():
        hint = "give the path of a Python file, then :function"
        raise ConfigError("there is no such file", by=file, hint=hint)
    module = import_file(path)
    function = recipe_function(module, name, file)
    with user_errors(path, f"{name}() failed"):
        job = function()
    if not isinstance(job, Job):
        what = f"{name}() returned {type(job).__name__}, not a Job"
        by, hint = defined_at(function) or spec, "end the function with `return piper.Job(...)`"
        raise ConfigError(what, by=by, hint=hint)
    return job if strategy is None else replace(job, strategy=strategy, elastic=None)


def recipe_function(module: ModuleType, name: str, file: str) -> Callable[[], object]:
    """Return the function of a recipe's file that needs no arguments, by its name."""
    found = getattr(module, name, None)
    if not callable(found):
        own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
        known = [n for n, value in own.items() if callable(value)]
        more = f" and {len(known) - MOST} more" if len(known) > MOST else ""
        close = get_close_matches(name, known, n=1)
        what = f"{name} is {type(found).__name__}, not a function"
        if not hasattr(module, name):
            what = f"there is no function {name!r}"
        raise ConfigError(
            what,
            by=file,
            facts={"has": ", ".join(known[:MOST]) + more or "no functions"},
            hint=f"did you mean {close[0]!r}?" if close else "name a function that returns a piper.Job",
        )
    needed = required(found)
    if needed:
        raise ConfigError(
            f"{name}() needs arguments, and a recipe is called with none",
            by=defined_at(found) or file,
            facts={"needs": ", ".join(needed)},
            hint="give each argument a default value",
        )
    return cast(Callable[[], object], found)


def required(function: Callable[..., object]) -> list[str]:
    """Return the arguments without which a function cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # written in C: the call will say
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def import_file(path: Path) -> ModuleType:
    """Import a Python file by its path. Modules in its folder can be imported too."""
    name = f"recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError("this is not a Python file", by=str(path), hint="give the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with user_errors(path, "the file cannot be imported"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def user_errors(path: Path, what: str) -> Iterator[None]:
    """Turn what a recipe's file raises inside into one message: its line, and the user's traceback."""
    try:
        yield
    except PiperError:
        raise
    except (Exception, SystemExit) as error:
        frames = users_frames(error)
        own = [place for place, _ in frames if place.startswith(f"{path.name}:")]
        line = own[-1].partition(" in ")[0].rpartition(":")[2] if own else None
        if line is None and isinstance(error, SyntaxError) and Path(error.filename or "").name == path.name:
            line = str(error.lineno)
        facts = {"why": said(error)}
        if len(frames) > 1:
            facts["trace"] = "\n".join(f"{place}: {code}" for place, code in frames)
        by, hint = f"{path}:{line}" if line else str(path), "fix the recipe at that line"
        raise ConfigError(what, by=by, facts=facts, hint=hint) from error
