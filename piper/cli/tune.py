"""`piper tune`: searches for the strategy with the shortest step that fits."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from piper.cli.application import Answer, Compile, CostsFile, Recipe, option
from piper.directives.json import load_strategy
from piper.errors import ConfigError, file_errors
from piper.ir.format import count, percent, seconds, size, table_of, wide_console
from piper.process.files import refuse_existing

if TYPE_CHECKING:
    from piper.tuning.evaluate import Evaluation
    from piper.tuning.lengths import TunedLengths
    from piper.tuning.result import Tuned
    from piper.tuning.strategy_search import StrategySearch
    from piper.tuning.tune import Progress as Report

MOST_RANKED = 12  # candidates in the table
MOST_FRONT = 12
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", re.IGNORECASE)


def tune(
    recipe: Recipe,
    cluster: Annotated[
        str, option("The machines: a100, h100, h200, b200, cpu, or a TOML file.", metavar="NAME|FILE")
    ],
    devices: Annotated[int, option("How many devices there are.", metavar="N")],
    memory: Annotated[
        str | None, option("What a device may hold, such as 74GiB; else all it has.", metavar="BYTES")
    ] = None,
    costs: CostsFile = None,
    trials: Annotated[
        int,
        option(
            "How many candidates to compile at most in the search; its last steps compile a few more.",
            metavar="N",
        ),
    ] = 80,
    start: Annotated[
        Path | None,
        option("A JSON strategy that you have: none is chosen that takes longer.", metavar="FILE"),
    ] = None,
    out: Annotated[Path | None, option("Write the best strategy as JSON.", metavar="FILE")] = None,
    python: Annotated[Path | None, option("Write the best strategy as Python.", metavar="FILE")] = None,
    workers: Annotated[
        int | None, option("Processes that evaluate candidates; else one a core.", metavar="N")
    ] = None,
    measure: Annotated[
        int | None, option("Run the best K on this machine too, and choose the fastest.", metavar="K")
    ] = None,
    lengths: Annotated[
        bool, option("Find a strategy for each length of the recipe's batches.", "--lengths")
    ] = False,
    compiled: Compile = False,
) -> Answer:
    """Search for the strategy of a recipe with the shortest simulated step that fits in memory.

    With --measure the best few then run on this machine, and the fastest of them is chosen. With --lengths
    the first batches of the data say which lengths there are, and each gets a strategy.
    Ctrl-C ends the search and gives the best strategy so far.
    """
    from piper.recipe import load_recipe  # torch is paid for only where it is used
    from piper.tuning.lengths import tune_lengths
    from piper.tuning.tune import tune as search

    for file in (out, python):
        if file is not None:
            refuse_existing(file)
    limit = None if memory is None else read_size(memory)
    asked: dict[str, Any] = {"memory": limit, "costs": costs, "trials": trials, "workers": workers}
    asked["compile"] = compiled
    first = None if start is None else load_strategy(start)
    job = load_recipe(recipe)
    if lengths:
        alone = {"--start": start, "--python": python, "--measure": measure}
        if used := next((name for name, value in alone.items() if value is not None), None):
            raise ConfigError(
                f"{used} is for one strategy", by="--lengths", hint=f"leave out {used} or --lengths"
            )
        with progress_on(wide_console(stderr=True), trials) as progress:
            by_length = tune_lengths(job, cluster, devices, **asked, progress=progress)
        write_new(out, by_length.json)
        return Answer(
            report=lengths_report(by_length),
            show=lambda: print_lengths(by_length, wide_console(), recipe, out),
        )
    with progress_on(wide_console(stderr=True), trials) as progress:
        tuned = search(job, cluster, devices, **asked, start=first, progress=progress, measure=measure)
    write_new(out, tuned.json)
    write_new(python, tuned.python)
    return Answer(report=tuned_report(tuned), show=lambda: print_tuned(tuned, wide_console(), recipe, out))


def write_new(file: Path | None, text: str) -> None:
    """Write a file that did not exist, if one was asked for."""
    if file is not None:
        hint = "name a file in a folder that exists and that you own"
        with file_errors("the strategy cannot be written", file, hint):
            refuse_existing(file)
            file.write_text(text, encoding="utf-8")


def read_size(text: str) -> int:
    """Read an amount of memory: `74GiB`, `80GB`, `512MiB`, or a number of bytes."""
    match = SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(
            f"{text!r} is not an amount of memory",
            by="--memory",
            hint="write a number with its unit: 74GiB, 80GB, 512MiB",
        )
    unit = match[2].lower()
    power = "kmgt".find(unit[:1] or "b") + 1
    return int(float(match[1]) * (1024 if "i" in unit else 1000) ** power)


@contextmanager
def progress_on(console: Console, trials: int) -> "Iterator[Report]":
    """Show how far a search is, and what is best so far."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("recording the model", total=trials)

        def report(search: "StrategySearch", evaluation: "Evaluation") -> None:
            text = f"{count(len(search.evaluated), 'candidate')} compiled"
            if search.best is not None:
                text += f", best {seconds(search.best.step)}"
            if search.measuring:
                text += f", measuring {search.measuring}"
            bar.update(task, completed=len(search.evaluated), description=text)

        yield report


def print_tuned(tuned: "Tuned", console: Console, recipe: str, out: Path | None) -> None:
    """Print the best strategy, the ranked candidates, the front, and why the others lost."""
    best = tuned.best
    console.print(
        f"Best: {tuned.step_text} a step on {count(tuned.devices, 'device')} of {tuned.machine}, at most "
        f"{size(best.peak)} of {size(tuned.limit)} each",
        style="bold",
    )
    rate = tuned.throughput.text(tuned.measured(best) or best.step) if tuned.throughput else ""
    console.print("; ".join(text for text in (f"  {best.choice.label}", rate) if text))
    console.print(f"  {verdict(tuned)}")
    if tuned.trial is not None and tuned.trial.note:
        console.print(f"  {tuned.trial.note}")
    if tuned.trial is not None and tuned.trial.warning:
        console.print(f"  Warning: {tuned.trial.warning}")
    console.print()
    print_ranked(tuned, console)
    print_front(tuned, console)
    print_discarded(tuned, console)
    console.print()
    if out is not None:
        console.print(f"{out}: piper check {recipe} --strategy {out}")
    else:
        console.print("--out FILE writes the best strategy, for piper check, train and view --strategy FILE")


def print_lengths(tuned: "TunedLengths", console: Console, recipe: str, out: Path | None) -> None:
    """Print the strategy of each length, how often it comes, and the mean step."""
    moves = f", {seconds(tuned.moves)} of it moves of the state" if tuned.moves else ""
    console.print(f"Best: {seconds(tuned.step)} a step on average{moves}", style="bold")
    table = table_of("length", "steps", "step", "peak", "strategy", left=("strategy",), wrap=("strategy",))
    for length, one in tuned.tuned.items():
        share = percent(tuned.shares[length], 1)
        table.add_row(str(length), share, seconds(one.best.step), size(one.best.peak), one.best.choice.label)
    console.print(table)
    if out is not None:
        console.print(f"{out}: piper check {recipe} --strategy {out}")
    else:
        console.print("--out FILE writes the strategies, for piper check and train --strategy FILE")


def candidate_report(tuned: "Tuned", one: "Evaluation") -> dict[str, object]:
    """Return a candidate that was compiled."""
    return {
        "label": one.choice.label,
        "step_s": one.step,
        "measured_s": tuned.measured(one),
        "bound_s": one.bound,
        "peak_bytes": one.peak,
        "reason": tuned.reason(one),
    }


def lengths_report(tuned: "TunedLengths") -> dict[str, object]:
    """Return the outcome of a search by length as one object."""
    return {
        "step_s": tuned.step,
        "moves_s": tuned.moves,
        "strategy": json.loads(tuned.json),
        "lengths": [
            {
                **candidate_report(one, one.best),
                "length": length,
                "share": tuned.shares[length],
                "evaluated": len(one.evaluated),
            }
            for length, one in tuned.tuned.items()
        ],
    }


def verdict(tuned: "Tuned") -> str:
    """Say how far the best strategy can be from the shortest of the space."""
    compiled = f"{count(len(tuned.evaluated), 'candidate')} compiled in {tuned.seconds:.1f} s"
    if tuned.trial is not None:
        compiled += f", {len(tuned.trial.runs)} of them measured"
    if tuned.interrupted:
        return f"{compiled}; interrupted, so a shorter one may be left"
    if tuned.complete:
        return f"{compiled}; the bounds rule out all others"
    left = max(0.0, tuned.best.step - tuned.lowest)
    return f"{compiled}; those left can be shorter by {percent(left, tuned.best.step)} at most: --trials"


def print_ranked(tuned: "Tuned", console: Console) -> None:
    """Print the candidates that were compiled, the shortest first, with the reason why each lost."""
    steps = ("step",) if tuned.trial is None else ("measured", "predicted")
    words = ("strategy", "reason")
    table = table_of(*steps, "bound", "bubble", "exposed", "peak", *words, left=words, wrap=words)
    for one in tuned.ranked[:MOST_RANKED]:
        measured = tuned.measured(one)
        table.add_row(
            *(() if tuned.trial is None else ("" if measured is None else seconds(measured),)),
            seconds(one.step),
            seconds(one.bound),
            percent(one.step - one.busy, one.step),
            percent(one.exposed, one.step),
            size(one.peak),
            one.choice.label,
            tuned.reason(one),
        )
    console.print(table)
    if len(tuned.evaluated) > MOST_RANKED:
        console.print(f"... and {len(tuned.evaluated) - MOST_RANKED} more: --json has all")


def print_front(tuned: "Tuned", console: Console) -> None:
    """Print the time-memory front as bars of memory."""
    front = tuned.front[:MOST_FRONT]
    most = max(one.peak for one in front)
    console.print()
    console.print("Time against memory: no candidate is better in both", style="bold")
    for one in front:
        bar = "█" * max(1, round(30 * one.peak / most))
        console.print(f"  {seconds(one.step):>8}  {size(one.peak):>10}  {bar:30}  {one.choice.label}")


def print_discarded(tuned: "Tuned", console: Console) -> None:
    """Print why candidates were discarded without compiling them."""
    if not tuned.discarded:
        return
    console.print()
    console.print("Discarded without compiling", style="bold")
    for kind, number in tuned.tally.items():
        console.print(f"  {number:>6}  {kind}")
    closest = min(tuned.discarded, key=lambda one: (one.bound, one.choice.label))
    console.print(f"  such as {closest.choice.label}: {tuned.reason_discarded(closest)}")


def tuned_report(tuned: "Tuned") -> dict[str, object]:
    """Return the outcome as one object."""
    return {
        "best": {**candidate_report(tuned, tuned.best), "strategy": json.loads(tuned.json)},
        "evaluated": len(tuned.evaluated),
        "seconds": tuned.seconds,
        "complete": tuned.complete,
        "interrupted": tuned.interrupted,
        "limit_bytes": tuned.limit,
        "load": None if tuned.trial is None else tuned.trial.load,
        "margin": None if tuned.trial is None else tuned.trial.margin,
        "traced": list(tuned.recorded),
        "ranked": [candidate_report(tuned, one) for one in tuned.ranked],
        "front": [candidate_report(tuned, one) for one in tuned.front],
        "discarded": tuned.tally,
        "losers": [
            {"label": one.choice.label, "group": one.grouped, "reason": tuned.reason_discarded(one)}
            for one in tuned.discarded
        ],
    }
