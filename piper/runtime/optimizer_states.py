"""What an optimizer keeps for each parameter, also where it steps other optimizers inside of it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from piper.errors import ConfigError

SETTINGS = ("state", "param_groups")  # of every optimizer
PLAIN = (bool, int, float, str)


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer, and those inside of it: attributes, or in their lists and dicts."""
    found = [optimizer]
    for each in found:
        inside = tree_leaves([value for key, value in vars(each).items() if key not in SETTINGS])
        found += {id(one): one for one in inside if isinstance(one, Optimizer) and one not in found}.values()
    return found


def plain_attributes(optimizer: Optimizer | None) -> dict[str, object]:
    """Return the attributes of an optimizer that are numbers or texts, such as a count of its steps."""
    known = {} if optimizer is None else vars(optimizer)
    return {key: value for key, value in known.items() if value is None or type(value) in PLAIN}


class SeveralStates(dict[Any, Any]):
    """By parameter, what several optimizers keep. What is set here is set in each that has the parameter."""

    def __init__(self, several: Sequence[Optimizer]) -> None:
        super().__init__()
        self.several = several
        for each in several:
            for key, kept in each.state.items():
                here = self.get(key, {})
                if twice := {} if here is kept else here.keys() & kept.keys():
                    raise ConfigError(
                        "two optimizers keep state of one name for one parameter",
                        by=" and ".join(type(one).__name__ for one in several),
                        facts={"state": ", ".join(sorted(twice))},
                        hint="let one of them keep it under another name",
                    )
                super().__setitem__(key, {**here, **kept} if here and here is not kept else kept)
        groups = ((each.state, group) for each in several for group in each.param_groups)
        self.places = [(state, {*group["params"]}) for state, group in groups]

    def __missing__(self, key: Tensor) -> object:
        self[key] = {}
        return self[key]

    def __setitem__(self, key: Tensor, value: object) -> None:
        super().__setitem__(key, value)
        for state in [state for state, params in self.places if key in params] or [self.several[0].state]:
            state[key] = value

    def pop(self, key: Tensor, *_: object) -> None:
        for each in self.several:
            each.state.pop(key, None)

    def clear(self) -> None:
        for each in self.several:
            each.state.clear()


def states_of(optimizer: Optimizer) -> dict[Any, Any]:
    """Return what an optimizer and those inside of it keep for each parameter, to read and write."""
    several = [each for each in optimizers_in(optimizer) if "state" in vars(each)]  # else it shows theirs
    return SeveralStates(several) if several not in ([], [optimizer]) else optimizer.state
