"""Names the user's own code in errors: its line, what it raised, and its part of the traceback."""

import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType

from piper.errors import ConfigError

_PACKAGE = str(Path(__file__).parents[1])
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = (_PACKAGE, *sorted(path for path in _PATHS if path))
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)')  # of a traceback inside a message
LINES = "lines"  # of the metadata of a chunk's code: the user's line behind each value, by the value's name
_WIDTH = 300  # characters of an exception's text that are shown


def is_users(filename: str) -> bool:
    """Return whether a file is the user's: not ours, not Python's, not an installed library's."""
    return not filename.startswith(("<", *_LIBRARIES)) and "site-packages" not in filename


def frame_line(filename: str, line: int | None) -> str:
    """Return a place in a file as errors write it: `llama.py:41`."""
    return f"{Path(filename).name}:{line}"


def calling_line() -> str | None:
    """Return the innermost line of the user's code that is running. None: no user's code called us."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else frame_line(frame.f_code.co_filename, frame.f_lineno)


def defined_at(thing: object) -> str | None:
    """Return the line where a function, class or callable object was written. None: not in a Python file."""
    while isinstance(thing, partial):
        thing = thing.func
    if inspect.ismethod(thing):
        thing = thing.__func__
    if inspect.isfunction(thing):
        code = inspect.unwrap(thing).__code__
        return frame_line(code.co_filename, code.co_firstlineno) if is_users(code.co_filename) else None
    kind = thing if inspect.isclass(thing) else type(thing)
    module = sys.modules.get(kind.__module__)
    filename = getattr(module, "__file__", None)
    if filename is None or not is_users(filename):
        return None
    try:
        return frame_line(filename, inspect.getsourcelines(kind)[1])
    except (OSError, TypeError):
        return Path(filename).name


def named(role: str, thing: object) -> str:
    """Return a part of the job with the line where it was written: `optimizer (llama.py:41)`."""
    where = defined_at(thing)
    return f"{role} ({where})" if where else role


def named_function(function: object) -> str:
    """Return the name of a function, with the line where it was written: `loss (llama.py:41)`."""
    return named(getattr(function, "__qualname__", type(function).__name__), function)


def said(error: BaseException) -> str:
    """Return an exception as one line: its type and its text.

    A DataLoader's worker puts a whole traceback into the text, whose last line is the exception.
    """
    text = str(error)
    if "Traceback (most recent call last)" in text:
        text = text.strip().splitlines()[-1]
    else:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return one_line(text)


def one_line(text: str) -> str:
    """Return a text as one line that is not too long for an error."""
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def users_frames(error: BaseException) -> list[tuple[str, str]]:
    """Return the user's part of a traceback, outermost first: each place with the code that is there."""
    found = [
        (f"{frame_line(frame.filename, frame.lineno)} in {frame.name}", frame.line or "")
        for frame in traceback.extract_tb(error.__traceback__)
        if is_users(frame.filename)
    ]
    for filename, line, function, code in _FRAME.findall(str(error)):
        if is_users(filename):
            found.append((f"{frame_line(filename, int(line))} in {function}", code.strip()))
    return found


def raised(
    what: str,
    error: BaseException,
    *,
    role: str,
    thing: object = None,
    facts: Mapping[str, str] | None = None,
    hint: str,
) -> ConfigError:
    """Return the error for user code that raised: its line, its exception, and its part of the traceback.

    role, thing: the part of the job that was called; its own line is named where the traceback has none.
    """
    frames = users_frames(error)
    where = frames[-1][0].partition(" in ")[0] if frames else defined_at(thing)
    rows = {**(facts or {}), "why": said(error)}
    if len(frames) > 1:
        rows["trace"] = "\n".join(f"{place}: {code}" if code else place for place, code in frames)
    return ConfigError(what, by=f"{role} ({where})" if where else role, facts=rows, hint=hint)


def failed_line(error: BaseException) -> str | None:
    """Return the line of the user's code behind the operation of a chunk that raised an error.

    None: the error was raised elsewhere, or in compiled code, which has no lines.
    """
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        lines: Mapping[str, str] | None = getattr(module, "meta", {}).get(LINES)
        if module is not None and lines is not None and frame.f_code.co_name == "forward":
            value = module.code.splitlines()[number - 1].partition("=")[0].strip()
            return lines.get(value)
    return None
