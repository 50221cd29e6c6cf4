"""The tests that `make test` leaves to `make test-all`, as `tests/extended.toml` lists them."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("extended.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Which parameters of a test `make test` leaves out."""

    kept: tuple[str, ...] | None = None  # it leaves out all others
    left_out: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[str, ...]:
        """Return the parameters that the list names."""
        return self.left_out if self.kept is None else self.kept

    def leaves_out(self, parameter: str) -> bool:
        """Return whether `make test` leaves this parameter out."""
        return parameter in self.left_out if self.kept is None else parameter not in self.kept


def listed() -> dict[str, dict[str, Division]]:
    """Return what the list says, by file and test."""
    return {
        file: {name: division_of(said) for name, said in tests.items()}
        for file, tests in tomllib.loads(LIST.read_text(encoding="utf-8")).items()
    }


def division_of(said: list[str] | dict[str, list[str]]) -> Division:
    """Return what one entry says."""
    if isinstance(said, list):
        return Division(kept=tuple(said))
    return Division(left_out=tuple(said["left_out"]))


def extended() -> Callable[[str], bool]:
    """Return a function that says of a test, by its id, whether `make test` leaves it out."""
    table = listed()

    def left_out(name: str) -> bool:
        file, _, rest = name.partition("::")
        test, _, parameter = rest.partition("[")
        division = table.get(file, {}).get(test)
        return division is not None and division.leaves_out(parameter.removesuffix("]"))

    return left_out
