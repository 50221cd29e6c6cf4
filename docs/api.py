"""Writes docs/api.md, the reference of the Python API, from signatures and docstrings: python docs/api.py."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import piper

PAGE = Path(__file__).with_name("api.md")
TOP = """# Python API

Every public name of `piper`, from its docstring. [The directives](README.md) have a page each; what they mean
together stands in [the tutorial](tutorial.md). `docs/api.py` writes this page.
"""
RETURNED = {  # classes that only Piper constructs, and what a script calls: `launch` returns a run
    "piper.Run": (
        *("train", "step", "batches", "evaluate", "predict", "save", "load", "state_dict", "gradients"),
        *("optimizer", "optimizer_state", "done", "resize", "stop", "close"),
    )
}
MODULES = ("schedules", "strategies", "losses", "callbacks", "data", "checkpoint")


def page() -> str:
    """Return the page."""
    entries = [TOP]
    for name in sorted(piper.__all__, key=str.lower):
        found = getattr(piper, name)
        if not isinstance(found, ModuleType):
            entries += entry(f"piper.{name}", found)
    for module in MODULES:
        found = getattr(piper, module)
        entries.append(f"## piper.{module}\n\n{inspect.cleandoc(found.__doc__ or '').strip()}\n")
        for name in names_of(found):
            entries += entry(f"piper.{module}.{name}", getattr(found, name), level=3)
    return "\n".join(entries)


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module: those it lists, else what it defines."""
    home = module.__name__
    own = (name for name, found in vars(module).items() if getattr(found, "__module__", "") == home)
    return list(getattr(module, "__all__", ())) or [name for name in own if not name.startswith("_")]


def entry(name: str, found: object, level: int = 2) -> Iterator[str]:
    """Yield the entry of one name: its signature and its docstring."""
    yield f"{'#' * level} {name}\n"
    if callable(found) and name not in RETURNED:
        yield f"<!-- figure -->\n```text\n{name}{signature(found)}\n```\n"
    text = inspect.cleandoc(found.__doc__ or "") if not isinstance(found, int | str | float) else ""
    if text:
        yield f"{fenced(text)}\n"
    for member in RETURNED.get(name, ()):
        yield from member_entry(f"{name}.{member}", inspect.getattr_static(found, member), level + 1)


def member_entry(name: str, found: object, level: int) -> Iterator[str]:
    """Yield the entry of a method, or of a property."""
    getter = found.fget if isinstance(found, property) else None
    if getter is None:
        yield from entry(name, found, level)
    else:
        yield f"{'#' * level} {name}\n\n{inspect.cleandoc(getter.__doc__ or '')}\n"


def signature(found: object) -> str:
    """Return a signature, one argument a line where it is long."""
    try:
        made = inspect.signature(found)  # type: ignore[arg-type]
    except ValueError:
        return "(...)"
    text = plain(str(made))
    if len(text) <= 90:
        return text
    lines = ",\n    ".join(plain(str(argument)) for argument in made.parameters.values())
    return f"(\n    {lines},\n)"


def plain(text: str) -> str:
    """Return part of a signature without module names and addresses."""
    text = re.sub(r"<function ([\w.<>]+) at 0x\w+>", r"\1", text)
    text = re.sub(r"<factory>|<object object at 0x\w+>", "...", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+([A-Z]\w*)", r"\1", text).replace("NoneType", "None")


def fenced(text: str) -> str:
    """Return a docstring whose drawings keep their form."""
    return f"<!-- figure -->\n```text\n{text}\n```" if "-->" in text else text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
