"""Formats tables, times, shares and bytes for people."""

from collections.abc import Collection, Iterable

from rich.console import Console
from rich.table import Table

WIDE = 120  # columns of a table that goes to a file
MOST = 3  # names that an error lists
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def wide_console(*, stderr: bool = False) -> Console:
    """Return a console that does not cut tables to 80 columns where it writes to a file."""
    console = Console(highlight=False, soft_wrap=True, markup=False, stderr=stderr)
    if not console.is_terminal:
        console.width = WIDE
    return console


def table_of(*headings: str, left: Collection[str] = (), wrap: Collection[str] = ()) -> Table:
    """Return a table without lines. left: the columns of text; others are of numbers. wrap: may be narrow."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in headings:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in wrap)
    return table


def size(nbytes: float) -> str:
    """Return bytes as text: `12.3 MiB`."""
    for unit in UNITS:
        if nbytes < 1024 or unit == UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("the last unit takes everything")


def seconds(value: float) -> str:
    """Return a time as text, in the unit that reads best: `23.8 ms`."""
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if value * scale >= 1 or unit == "us":
            return f"{value * scale:.3g} {unit}" if value * scale < 1000 else f"{value * scale:.0f} {unit}"
    raise AssertionError("the last unit takes everything")


def percent(part: float, whole: float) -> str:
    """Return a share as text: `12.3 %`."""
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def count(number: int, what: str) -> str:
    """Return a number of things as text: `1 program`, `2 programs`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def listed(names: Iterable[str], separator: str = ", ") -> str:
    """Return the first few names as text, and how many more there are."""
    first = [*names]
    more = [f"and {len(first) - MOST} more"] if len(first) > MOST else []
    return separator.join([*first[:MOST], *more])
