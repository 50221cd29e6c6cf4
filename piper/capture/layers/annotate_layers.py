"""Finds the repeated blocks of a model without annotations, and tags each as a layer."""

from collections import Counter
from dataclasses import dataclass

from torch import nn

from piper.capture.trace.annotate import annotate_modules, listed_regions
from piper.errors import ConfigError
from piper.ir.grouping import grouped

TAG = "LAYER"
LISTS = (nn.ModuleList, nn.ModuleDict)  # which are never called
CONTAINERS = (*LISTS, nn.Sequential)
SHARE = 1 / 4  # of the largest stack's parameters, or block's, from which on another one counts too


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
