"""The report of `piper tune`: as tables for people, as one object for programs."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from piper.errors import ConfigError
from piper.ir.format import count, percent, seconds, size

if TYPE_CHECKING:
    from piper.tuning.evaluate import Evaluation
    from piper.tuning.result import Tuned
    from piper.tuning.strategy_search import StrategySearch
    from piper.tuning.tune import Progress as Report

MOST_RANKED = 12  # candidates in the table
MOST_FRONT = 12
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", re.IGNORECASE)
SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def read_size(text: str) -> int:
    """Read an amount of memory: `74GiB`, `80GB`, `512MiB`, or a number of bytes."""
    found = SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(
            f"{text!r} is not an amount of memory",
            by="--memory",
            hint="write a number with its unit: 74GiB, 80GB, 512MiB",
        )
    number, unit = float(found[1]), found[2].lower()
    step = SCALES[unit[:1] if unit[:1] != "b" else ""]
    if "i" in unit:
        step = 2 ** {10**3: 10, 10**6: 20, 10**9: 30, 10**12: 40}.get(step, 0)
    return int(number * step)


@contextmanager
def progress_on(console: Console, trials: int) -> "Iterator[Report]":
    """Show how far a search is, and what is best so far."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("recording the model", total=trials)

        def report(search: "StrategySearch", found: "Evaluation") -> None:
            best = search.best.step if search.best is not None else None
            text = f"{count(len(search.evaluated), 'candidate')} compiled"
            if best is not None:
                text += f", best {seconds(best)}"
            if search.measuring:
                text += f", measuring {search.measuring}"
            bar.update(task, completed=len(search.evaluated), description=text)

        yield report


def print_tuned(found: "Tuned", console: Console, recipe: str, out: Path | None) -> None:
    """Print the best strategy, the ranked candidates, the front, and why the others lost."""
    best = found.best
    console.print(
        f"Best: {found.step_text} a step on {count(found.devices, 'device')} of {found.machine}, at most "
        f"{size(best.peak)} of {size(found.limit)} each",
        style="bold",
    )
    console.print(f"  {best.choice.label}")
    console.print(f"  {verdict(found)}")
    if found.trial is not None and found.trial.note:
        console.print(f"  {found.trial.note}")
    if found.trial is not None and found.trial.warning:
        console.print(f"  Warning: {found.trial.warning}")
    console.print()
    print_ranked(found, console)
    print_front(found, console)
    print_discarded(found, console)
    console.print()
    if out is not None:
        console.print(f"{out}: piper check {recipe} --strategy {out}")
    else:
        console.print("--out FILE writes the best strategy, for piper check, train and view --strategy FILE")


def verdict(found: "Tuned") -> str:
    """Say how far the best strategy can be from the shortest of the space."""
    compiled = f"{count(len(found.evaluated), 'candidate')} compiled in {found.seconds:.1f} s"
    if found.trial is not None:
        compiled += f", {len(found.trial.runs)} of them measured"
    if found.interrupted:
        return f"{compiled}; interrupted, so a shorter one may be left"
    if found.complete:
        return f"{compiled}; the bounds rule out all others"
    left = max(0.0, found.best.step - found.lowest)
    return f"{compiled}; those left can be shorter by {percent(left, found.best.step)} at most: --trials"


def print_ranked(found: "Tuned", console: Console) -> None:
    """Print the candidates that were compiled, the shortest first, with the reason why each lost."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    steps = ("step",) if found.trial is None else ("measured", "predicted")
    for heading in (*steps, "bound", "bubble", "exposed", "peak", "strategy", "reason"):
        left = heading in ("strategy", "reason")
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left)
    for one in found.ranked[:MOST_RANKED]:
        measured = found.measured(one)
        table.add_row(
            *(() if found.trial is None else ("" if measured is None else seconds(measured),)),
            seconds(one.step),
            seconds(one.bound),
            percent(one.bubble, 1),
            percent(one.exposed, one.step),
            size(one.peak),
            one.choice.label,
            found.reason(one),
        )
    console.print(table)
    if len(found.evaluated) > MOST_RANKED:
        console.print(f"... and {len(found.evaluated) - MOST_RANKED} more: --json has all")


def print_front(found: "Tuned", console: Console) -> None:
    """Print the time-memory front as bars of memory."""
    front = found.front[:MOST_FRONT]
    most = max(one.peak for one in front)
    console.print()
    console.print("Time against memory: no candidate is better in both", style="bold")
    for one in front:
        bar = "█" * max(1, round(30 * one.peak / most))
        console.print(f"  {seconds(one.step):>8}  {size(one.peak):>10}  {bar:30}  {one.choice.label}")


def print_discarded(found: "Tuned", console: Console) -> None:
    """Print why candidates were discarded without compiling them."""
    from piper.tuning.result import reason_of, tally

    if not found.discarded:
        return
    console.print()
    console.print("Discarded without compiling", style="bold")
    for kind, number in tally(found.discarded):
        console.print(f"  {number:>6}  {kind}")
    closest = min(found.discarded, key=lambda one: (one.bound, one.choice.label))
    console.print(f"  such as {closest.choice.label}: {reason_of(closest, found.best.step)}")


def tuned_report(found: "Tuned") -> dict[str, object]:
    """Return the outcome as one object."""
    from piper.tuning.result import reason_of, tally

    return {
        "best": {
            "step_s": found.best.step,
            "measured_s": found.measured(found.best),
            "peak_bytes": found.best.peak,
            "label": found.best.choice.label,
            "strategy": json.loads(found.json),
        },
        "evaluated": len(found.evaluated),
        "seconds": found.seconds,
        "complete": found.complete,
        "interrupted": found.interrupted,
        "limit_bytes": found.limit,
        "load": None if found.trial is None else found.trial.load,
        "margin": None if found.trial is None else found.trial.margin,
        "traced": list(found.recorded),
        "ranked": [
            {
                "step_s": one.step,
                "measured_s": found.measured(one),
                "bound_s": one.bound,
                "peak_bytes": one.peak,
                "label": one.choice.label,
                "reason": found.reason(one),
            }
            for one in found.ranked
        ],
        "front": [{"step_s": one.step, "peak_bytes": one.peak} for one in found.front],
        "discarded": dict(tally(found.discarded)),
        "losers": [
            {"label": one.choice.label, "group": one.grouped, "reason": reason_of(one, found.best.step)}
            for one in found.discarded
        ],
    }
