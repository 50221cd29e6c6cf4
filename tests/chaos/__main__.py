"""Disturb runs for some minutes, and print what it cost: `python -m tests.chaos --minutes 60 --seed 17`.

Times are from an event to the next step. Where an agent had to become warm first, they are from then on, and `warm s`
has the longest time that one took.
"""

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Sequence

import pytest

from tests.chaos.parts import Seen, measure
from tests.chaos.sizes import PARTS

HEADS = (
    "part",
    "asked",
    "events",
    "recovered",
    "p50 s",
    "p95 s",
    "max s",
    "warm s",
    "identical",
    "orphans",
    "in /dev/shm",
    "min",
)
WIDE = (16, 6, 7, 10, 7, 7, 7, 7, 10, 8, 12, 6)


def row(cells: Sequence[object]) -> None:
    """Print a row of the table now."""
    sys.stdout.write(
        " ".join(f"{cell!s:<{wide}}" for cell, wide in zip(cells, WIDE, strict=True)).rstrip() + "\n"
    )
    sys.stdout.flush()


def at(times: list[float], part: float) -> str:
    """Return a quantile of times, as the smallest that so many do not exceed."""
    return f"{sorted(times)[max(0, -int(-part * len(times) // 1) - 1)]:.2f}" if times else "-"


def cells(name: str, events: int, seen: Seen, minutes: float) -> list[object]:
    return [
        name, events, seen.events, seen.recovered, at(seen.seconds, 0.5), at(seen.seconds, 0.95), at(seen.seconds, 1),
        at(seen.warm, 1), "yes" if seen.identical else "NO", seen.orphans, len(seen.left), f"{minutes:.1f}",
    ]  # fmt: skip


def main() -> int:
    """Run the parts that are asked for. Return 1 if one was not recovered from."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all parts together: 60 by default")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of events: 1 by default")
    parser.add_argument("--seed", type=int, default=17)
    asked = parser.parse_args()
    if unknown := {*asked.parts} - {*PARTS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    chosen = {name: PARTS[name] for name in PARTS if not asked.parts or name in asked.parts}
    good, left, shares = True, asked.minutes, sum(part.minutes for part in chosen.values())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what the parts have started
    row(HEADS)
    for name, part in chosen.items():
        events, began = max(1, round(part.events * asked.scale)), time.monotonic()
        try:
            seen = measure(part.act, events=events, minutes=left * part.minutes / shares, seed=asked.seed)
        except pytest.skip.Exception as skipped:
            row([name, events, *["-"] * 9, f"skipped: {skipped}"])
        except Exception:  # noqa: BLE001  it is shown, and the other parts are as interesting
            traceback.print_exc()
            row([name, events, "FAILED", *["-"] * 9])
            good = False
        else:
            row(cells(name, events, seen, (time.monotonic() - began) / 60))
            good &= seen.sound()
        left, shares = max(0.0, left - (time.monotonic() - began) / 60), shares - part.minutes
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
