"""Marks the regions of a model that a strategy can name, in the model's code or from outside.

An annotation only marks the operations that a capture records: with a key `piper:PP` and a value that is
different for each region. Marks grow in the order the regions were made, so capture can count them from 0.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MethodType

import torch
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.fx import traceback

from piper.capture.trace_errors import tracing_line
from piper.errors import ConfigError

PREFIX = "piper:"  # of the keys of marks: other tools put their own keys in the same metadata
Entry = str | Sequence[str]
Mark = tuple[int, int]
_LISTED = "_piper_regions"  # the attribute in which a model keeps the regions that `annotate_modules` made


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A region that was annotated, whether or not an operation runs in it."""

    tag: str
    mark: Mark
    where: str  # the line or the modules, for errors


_ENTERED: ContextVar[list[Region] | None] = ContextVar("entered", default=None)


@contextmanager
def entered_regions() -> Iterator[list[Region]]:
    """Collect the regions that a trace enters; `begin_trace` empties the list."""
    regions: list[Region] = []
    token = _ENTERED.set(regions)
    try:
        yield regions
    finally:
        _ENTERED.reset(token)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def begin_trace() -> None:
    """Clear the entered regions when a trace begins. Dynamo may give up a trace and start again."""
    regions = _ENTERED.get()
    if regions is not None:
        regions.clear()


def listed_regions(model: nn.Module) -> list[Region]:
    """Return the regions that `annotate_modules` made in a model and its submodules."""
    return [region for module in model.modules() for region in vars(module).get(_LISTED, ())]


@contextmanager
def annotate(tag: str) -> Iterator[None]:
    """Make the operations that run inside one region: PP=0, PP=1, ... in the order entered.

    Do nothing outside a capture.
    """
    if torch.compiler.is_compiling():
        with traceback.annotate({PREFIX + tag: _next_mark(tag)}):
            yield
    else:
        yield


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _next_mark(tag: str) -> Mark:
    """Return a mark larger than all earlier ones, while tracing: each iteration of a loop gets its own."""
    mark = (time.perf_counter_ns(), 0)
    regions = _ENTERED.get()
    # A higher-order operation is one node of the graph, so no region begins within its body.
    if regions is not None and InstructionTranslator.current_tx().output.current_tracer.parent is None:
        regions.append(Region(tag=tag, mark=mark, where=tracing_line().strip(" ()")))
    return mark


def annotate_modules(model: nn.Module, regions: Mapping[str, Sequence[Entry]]) -> nn.Module:
    """Make submodules regions by wrapping their `forward`, for a model you cannot edit. Return the model.

    regions: for each tag its regions in order. A region is a module's path, several paths together, or a
    pattern such as `layers.*.mlp.experts`, of which each match becomes a region.
    """
    if not isinstance(regions, Mapping):
        raise ConfigError(
            f"regions is {type(regions).__name__}, not a dict of tags",
            by="annotate_modules",
            hint='name the regions of each tag: annotate_modules(model, {"PP": ["layers.0", "layers.1"]})',
        )
    modules = dict(model.named_modules())
    _name_once(model, modules, regions)
    listed: list[Region] = vars(model).setdefault(_LISTED, [])
    for tag, entries in regions.items():
        start = time.perf_counter_ns()
        for number, paths in enumerate(_regions(tag, entries, list(modules))):
            listed.append(Region(tag=tag, mark=(start, number), where=", ".join(paths)))
            for path in paths:
                module = modules[path]
                module.forward = _marked(module.forward, {PREFIX + tag: (start, number)})
    return model


def _marked(forward: Callable[..., object], mark: dict[str, Mark]) -> Callable[..., object]:
    """Return the forward of a module that opens a region. A copy of the module calls its own."""
    # Dynamo cannot trace a hook that opens a region; it can trace a wrapped forward.
    wrap: Callable[[Callable[..., object]], Callable[..., object]] = traceback.annotate_fn(mark)
    if isinstance(forward, MethodType):  # `copy.deepcopy` binds it to the copy, and keeps other functions
        return MethodType(wrap(forward.__func__), forward.__self__)
    return wrap(forward)


def _regions(tag: str, entries: Sequence[Entry], paths: Sequence[str]) -> Iterator[list[str]]:
    """Yield each region's module paths, with patterns expanded."""
    if isinstance(entries, str):
        raise ConfigError(
            f"the regions of {tag} are a list, not one string",
            by="annotate_modules",
            hint=f'write {{"{tag}": ["{entries}"]}}',
        )
    for entry in entries:
        if isinstance(entry, str):
            yield from ([path] for path in _matches(tag, entry, paths))
        else:
            yield [path for pattern in entry for path in _matches(tag, pattern, paths)]


def _name_once(
    model: nn.Module, modules: Mapping[str, nn.Module], regions: Mapping[str, Sequence[Entry]]
) -> None:
    """Refuse the second name of a module that a model uses in several places: its calls are one region."""
    first = {id(module): path for path, module in modules.items()}
    for path, module in model.named_modules(remove_duplicate=False):
        for tag, entries in regions.items():
            named = any(path in ([entry] if isinstance(entry, str) else entry) for entry in entries)
            if path not in modules and named:
                name = first[id(module)]
                raise ConfigError(
                    f"{path!r} is the module that is called {name!r} too",
                    by=f"annotate_modules, {tag}",
                    hint=f"name {name!r} once: all calls of a module are one region. For a region of each, "
                    "write `with piper.annotate(...)` in the forward",
                )


def _matches(tag: str, pattern: str, paths: Sequence[str]) -> list[str]:
    """Return the module paths that match a pattern, in the model's order. A star is one path component."""
    parts = pattern.split(".")
    split = {path: path.split(".") for path in paths}
    matches = [
        path for path, own in split.items() if len(own) == len(parts) and all(map(fnmatchcase, own, parts))
    ]
    if not matches:
        close = get_close_matches(pattern, [path for path in paths if path], n=3, cutoff=0.5)
        raise ConfigError(
            f"the model has no module {pattern!r}",
            by=f"annotate_modules, {tag}",
            facts={"close": ", ".join(close) or "nothing"},
            hint="name modules as model.named_modules() does; * stands for one part of a path",
        )
    return matches
