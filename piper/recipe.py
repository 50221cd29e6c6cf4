"""Finding a recipe: `file.py:function`, which returns a job."""

import importlib.util
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from piper.errors import ConfigError, PiperError
from piper.job import Job


def load_recipe(spec: str) -> Job:
    """Import a recipe's file and call its function."""
    file, _, name = spec.rpartition(":")
    if not file or not name:
        raise ConfigError(
            "this is not a recipe",
            by=spec,
            hint="name the file and the function: piper plan recipes/dense.py:pp",
        )
    path = Path(file)
    if not path.is_file():
        raise ConfigError(
            "there is no such file", by=file, hint="give the path of a Python file, then :function"
        )
    module = import_file(path)
    function = getattr(module, name, None)
    if not callable(function):
        known = [
            n
            for n, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        close = get_close_matches(name, known, n=1)
        raise ConfigError(
            f"there is no function {name!r}",
            by=file,
            facts={"has": ", ".join(known) or "no functions"},
            hint=f"did you mean {close[0]!r}?" if close else "name a function that returns a piper.Job",
        )
    try:
        job = function()
    except PiperError:
        raise
    except Exception as error:
        raise user_error(error, path, f"{name}() failed") from error
    if not isinstance(job, Job):
        raise ConfigError(
            f"{name}() returned {type(job).__name__}, not a Job",
            by=spec,
            hint="end the function with `return piper.Job(...)`",
        )
    return job


def import_file(path: Path) -> ModuleType:
    """Import a Python file by its path; what lies beside it can be imported too."""
    name = f"recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, f"{path} has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except PiperError:
        raise
    except Exception as error:
        raise user_error(error, path, "the file cannot be imported") from error
    return module


def user_error(error: Exception, path: Path, what: str) -> ConfigError:
    """An error in the user's file, at the line where it left it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    where = f"{path}:{line}" if line else str(path)
    return ConfigError(
        what, by=where, facts={"why": f"{type(error).__name__}: {error}"}, hint="mend the recipe at that line"
    )
