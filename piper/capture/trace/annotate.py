"""Marks the regions of a model that a strategy can name, in the model's code or from outside.

An annotation only marks the operations that a capture records: with a key `piper:PP` and a value that is
different for each region. Marks grow in the order the regions were made, so capture can count them from 0.
"""

import time
from collections import Counter
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
from piper.ir.grouping import grouped

PREFIX = "piper:"  # of the keys of marks: other tools put their own keys in the same metadata
TAG = "LAYER"
LISTS = (nn.ModuleList, nn.ModuleDict)  # which are never called
CONTAINERS = (*LISTS, nn.Sequential)
SHARE = 1 / 4  # of the largest stack's parameters, or block's, from which on another one counts too
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
    if not isinstance(regions, Mapping) or any(isinstance(entries, str) for entries in regions.values()):
        raise ConfigError(
            "regions is not a dict that has a list of regions for each tag",
            by="annotate_modules",
            facts={"regions": repr(regions)},
            hint='name the regions of each tag: annotate_modules(model, {"PP": ["layers.0", "layers.1"]})',
        )
    modules = dict(model.named_modules())
    listed: list[Region] = vars(model).setdefault(_LISTED, [])
    for tag, entries in regions.items():
        start = time.perf_counter_ns()
        for number, paths in enumerate(_regions(tag, entries, model, list(modules))):
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


def _regions(
    tag: str, entries: Sequence[Entry], model: nn.Module, paths: Sequence[str]
) -> Iterator[list[str]]:
    """Yield each region's module paths, with patterns expanded."""
    for entry in entries:
        if isinstance(entry, str):
            yield from ([path] for path in _matches(tag, entry, model, paths))
        else:
            yield [path for pattern in entry for path in _matches(tag, pattern, model, paths)]


def _matches(tag: str, pattern: str, model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Return the module paths that match a pattern, in the model's order. A star is one path component."""
    parts = pattern.split(".")
    split = {path: path.split(".") for path in paths}
    matches = [
        path for path, own in split.items() if len(own) == len(parts) and all(map(fnmatchcase, own, parts))
    ]
    again = dict(model.named_modules(remove_duplicate=False)).get(pattern) if not matches else None
    if again is not None:
        name = next(path for path, module in model.named_modules() if module is again)
        raise ConfigError(
            f"{pattern!r} is the module that is called {name!r} too",
            by=f"annotate_modules, {tag}",
            hint=f"name {name!r} once: all calls of a module are one region. For a region of each, "
            "write `with piper.annotate(...)` in the forward",
        )
    if not matches:
        close = get_close_matches(pattern, filter(None, split), n=3, cutoff=0.5)
        raise ConfigError(
            f"the model has no module {pattern!r}",
            by=f"annotate_modules, {tag}",
            facts={"close": ", ".join(close) or "nothing"},
            hint="name modules as model.named_modules() does; * stands for one part of a path",
        )
    return matches


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The repeated blocks of one container."""

    blocks: tuple[str, ...]  # their paths, in order
    kinds: frozenset[type[nn.Module]]
    size: float  # parameters of all blocks


def annotate_layers(model: nn.Module) -> nn.Module:
    """Tag the repeated blocks of a model LAYER=0, LAYER=1, ... in the order it lists them; return the model.

    The blocks are those of the container (`ModuleList`, `Sequential` or `ModuleDict`) that holds the most
    parameters in blocks of one class. A model with several such containers, such as an encoder and a decoder,
    has its layers numbered consecutively. Of a language model with a vision or audio tower, such as LLaVA,
    only the layers of the language model count. Operations outside the layers join their neighbours.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{model!r} is not a module",
            by="annotate_layers",
            hint="give it the model: annotate_layers(LlamaForCausalLM(config))",
        )
    if any(region.tag == TAG for region in listed_regions(model)):
        raise ConfigError(
            f"the model has regions {TAG} already", by="annotate_layers", hint="annotate a model once"
        )
    layers = find_layers(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no repeated layers",
            by="annotate_layers",
            facts={"looked for": "a ModuleList, Sequential or ModuleDict with two blocks of one class"},
            hint=f'name its regions yourself: annotate_modules(model, {{"{TAG}": ["first", "second"]}})',
        )
    return annotate_modules(model, {TAG: [[path] for path in layers]})


def find_layers(model: nn.Module) -> list[str]:
    """Return the paths of a model's layers, in order; none where nothing repeats."""
    stacks: list[Stack] = []
    for path, module in model.named_modules():
        inside = any(f"{path}.".startswith(f"{block}.") for stack in stacks for block in stack.blocks)
        if isinstance(module, CONTAINERS) and not inside and (stack := _stack(path, module)) is not None:
            stacks.append(stack)
    stacks = _of_language(model, stacks)
    if not stacks:
        return []
    largest = max(stacks, key=lambda stack: stack.size)
    return [
        block
        for stack in stacks
        if stack.kinds & largest.kinds or stack.size >= SHARE * largest.size
        for block in stack.blocks
    ]


def _of_language(model: nn.Module, stacks: list[Stack]) -> list[Stack]:
    """Return the stacks of the language model, where others see or hear for it; else all of them.

    A model of transformers says so in its config: it has one of its own for the text.
    """
    config, generates = getattr(model, "config", None), getattr(model, "can_generate", None)
    if config is None or not hasattr(config, "get_text_config") or generates is None or not generates():
        return stacks
    text = config.get_text_config()
    if text is config or config.is_encoder_decoder:
        return stacks
    return [stack for stack in stacks if type(_config_of(model, stack.blocks[0])) is type(text)] or stacks


def _config_of(model: nn.Module, path: str) -> object:
    """Return the config of the innermost module around a block that has one."""
    names = path.split(".")
    around = (model.get_submodule(".".join(names[:end])) for end in range(len(names), -1, -1))
    return next((module.config for module in around if hasattr(module, "config")), None)


def _stack(path: str, container: nn.Module) -> Stack | None:
    """Return the repeated blocks of a container. None: it has no two of one class with parameters."""
    children = dict(container.named_children())
    # What blocks share counts in parts: all hybrid layers of Zamba call the same attention.
    users = Counter(parameter for child in children.values() for parameter in child.parameters())
    sizes = {
        name: sum(parameter.numel() / users[parameter] for parameter in child.parameters())
        for name, child in children.items()
    }
    called = [name for name, child in children.items() if sizes[name] and not isinstance(child, LISTS)]
    by_class = grouped((type(children[name]), name) for name in called)
    repeated = {kind: names for kind, names in by_class.items() if len(names) > 1}
    if not repeated:
        return None
    # Containers that alternate two classes of blocks count both; a small projection is no block.
    least = SHARE * max(sum(sizes[name] for name in names) / len(names) for names in repeated.values())
    kinds = {kind for kind, names in repeated.items() if sum(sizes[n] for n in names) >= least * len(names)}
    blocks = [name for name in children if type(children[name]) in kinds]
    return Stack(
        blocks=tuple(f"{path}.{name}" if path else name for name in blocks),
        kinds=frozenset(kinds),
        size=sum(sizes[name] for name in blocks),
    )
