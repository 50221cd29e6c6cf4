"""The options of a run's optimizer, to read and to set: `run.optimizer[0]["lr"] = 1e-4`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from piper.errors import ConfigError
from piper.ir.numbers import is_number

if TYPE_CHECKING:
    from piper.run.run import Run


class OptimizerGroups(Sequence["OptimizerGroup"]):
    """The groups of a run's optimizer. `run.optimizer[0]["lr"]` is the learning rate of the first."""

    def __init__(self, run: "Run") -> None:
        self.run = run

    @overload
    def __getitem__(self, index: int) -> "OptimizerGroup": ...
    @overload
    def __getitem__(self, index: slice) -> "list[OptimizerGroup]": ...
    def __getitem__(self, index: int | slice) -> "OptimizerGroup | list[OptimizerGroup]":
        groups = [OptimizerGroup(self.run, number) for number in range(len(self))]
        return groups[index]

    def __len__(self) -> int:
        return len(self.run.optimizer_groups())

    def __repr__(self) -> str:
        return repr(self.run.optimizer_groups())


class OptimizerGroup(Mapping[str, object]):
    """The options of one group of parameters. Those that are numbers can be set, between steps."""

    def __init__(self, run: "Run", number: int) -> None:
        self.run, self.number = run, number

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401  an optimizer may have any options
        return self.run.optimizer_groups()[self.number][key]

    def __setitem__(self, key: str, value: float) -> None:
        known = self.run.optimizer_groups()[self.number]
        if key not in known or not is_number(value):
            raise ConfigError(
                f"the option {key!r} of an optimizer cannot be set to {value!r}",
                by="run.optimizer",
                facts={"options": ", ".join(known)},
                hint='set one of these to a number: run.optimizer[0]["lr"] = 1e-4',
            )
        self.run.set_optimizer_option(self.number, key, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.run.optimizer_groups()[self.number])

    def __len__(self) -> int:
        return len(self.run.optimizer_groups()[self.number])

    def __repr__(self) -> str:
        return repr(self.run.optimizer_groups()[self.number])
