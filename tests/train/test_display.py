"""What a person sees: a live display on a terminal, plain lines elsewhere."""

import io
import logging
from dataclasses import replace

from rich.console import Console

from piper.train.measure import Lines, Measure, Stages, curve, display, numbers


def measure(step: int) -> Measure:
    return Measure(
        step=step,
        loss=5 / step,
        grad_norm=1.25,
        lr=3e-3,
        tokens_per_s=12345.6,
        samples_per_s=6.0,
        step_s=0.083,
    )


def test_a_terminal_sees_a_bar_a_curve_and_the_numbers() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with display(console, done=0, steps=10, peak=3 * 1024**2) as tell:
        for step in range(1, 5):
            tell(measure(step))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    last = shown[shown.rindex("loss  █") :]
    assert last.startswith("loss  █▃▂▁")
    assert (
        "loss 1.2500   grad norm 1.250   lr 3.00e-03   12,346 tokens/s   83 ms/step   memory 3.0 MiB a device"
        in last
    )
    assert "4/10" in last and "left" in last


def test_elsewhere_it_is_plain_lines_some_of_them() -> None:
    console = Console(file=io.StringIO(), width=200)
    with display(console, done=0, steps=100, peak=0) as tell:
        for step in range(1, 101):
            tell(measure(step))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[1] for line in lines[:3]] == ["1/100", "5/100", "10/100"]
    assert len(lines) == 21
    assert lines[-1] == (
        "step 100/100   loss 0.0500   grad norm 1.250   lr 3.00e-03   12,346 tokens/s   83 ms/step   0 s left"
    )


def test_a_slow_run_is_not_silent() -> None:
    console, now = Console(file=io.StringIO(), width=200), iter(range(0, 10_000, 6))
    lines = Lines(console, done=0, steps=1000, clock=lambda: float(next(now)))
    for step in range(1, 8):
        lines(measure(step))
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[1] for line in shown] == ["1/1000", "3/1000", "5/1000", "7/1000"]
    assert shown[-1].endswith("   5958 s left")


def test_a_curve_of_one_value_is_flat() -> None:
    assert curve([2.0]) == "▁"
    assert len(curve([float(i) for i in range(1000)])) == 40


def test_stages_before_the_first_step_are_shown_and_counted_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    log, level = logging.getLogger("piper"), logging.getLogger("piper").level
    stages = Stages(console)
    with stages:
        log.debug("Tracing the model")
        stages.progress.refresh()
        log.info("Compiling graph 1 of 4: F of PP=0", extra={"done": 0, "total": 4})
        log.info("Compiling graph 2 of 4: B of PP=0", extra={"done": 1, "total": 4})
        assert (stages.progress.tasks[0].completed, stages.progress.tasks[0].total) == (1, 4)
        stages.progress.refresh()
        log.warning("the cache cannot be written")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    places = [shown.index(text) for text in ("Tracing the model", "graph 2 of 4", "the cache cannot be")]
    assert places == sorted(places) and "0:00:00" in shown
    assert (log.level, log.handlers) == (level, [])


def test_elsewhere_stages_are_plain_lines_of_what_takes_long() -> None:
    console = Console(file=io.StringIO(), width=100)
    with Stages(console):
        logging.getLogger("piper").debug("Tracing the model")
        logging.getLogger("piper").info("Compiling graph 1 of 4: F of PP=0", extra={"done": 0, "total": 4})
    assert console.file.getvalue() == "Compiling graph 1 of 4: F of PP=0\n"  # type: ignore[attr-defined]


def test_samples_are_shown_where_there_are_no_tokens() -> None:
    assert "   6 samples/s   " in numbers(replace(measure(1), tokens_per_s=None))
