"""Judges the samples written here and torch's own in every layout, a part of them at a time, without pytest.

    python -m tests.capture.shard.every_rule --shard 0/16 --devices 2,3,4 --out FILE

FILE has a line for each operation, one for each wrong case with the command that runs it alone, and the totals.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from piper.errors import CaptureError
from piper.ir.sharding import Partial
from tests.capture.shard.hand_samples import hand_samples
from tests.capture.shard.samples import operations, samples
from tests.capture.shard.verdict import Sample, Verdict, combinations, judge, recorded, targets_of

DEVICES = (2, 3, 4)
SAMPLES, LAYOUTS = 4, 24  # of an operation, and of a sample on each number of devices
HAND_LAYOUTS = 200
COUNTED = ("equal", "refused", "wrong", "raw", "not recorded")


@dataclass(slots=True)
class Report:
    """How often each verdict came, which operations were equal, and what was wrong, with how to run it alone."""

    verdicts: Counter[str] = field(default_factory=Counter)
    exercised: set[str] = field(default_factory=set)
    bad: list[str] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Count another report too."""
        self.verdicts += other.verdicts
        self.exercised |= other.exercised
        self.bad += other.bad

    def totals(self) -> str:
        """Return the count of each verdict."""
        return ", ".join(f"{self.verdicts[kind]} {kind}" for kind in COUNTED)


def judged(given: Iterable[Sample], degrees: Sequence[int], limit: int) -> Report:
    """Judge samples in many layouts."""
    report = Report()
    for sample in given:
        try:
            recording = recorded(sample)
        except CaptureError:
            report.verdicts["not recorded"] += 1
            continue
        except Exception as error:  # noqa: BLE001  the suite counts raw errors
            _note(report, sample, "", Verdict(kind="raw", text=f"{type(error).__name__}: {str(error)[:300]}"))
            continue
        for degree in degrees:
            for layouts in combinations(sample.tensors, degree, limit):
                if sample.direct and Partial() in layouts:
                    continue  # no parameter is a pending sum
                verdict = judge(sample, recording, layouts, degree)
                _note(report, sample, f" on {degree} in {layouts}", verdict)
                if verdict.kind == "equal":
                    report.exercised |= targets_of(recording)
    return report


def _note(report: Report, sample: Sample, where: str, verdict: Verdict) -> None:
    report.verdicts[verdict.kind] += 1
    if verdict.kind in ("wrong", "raw"):
        alone = f'python -m tests.capture.shard.every_rule --only "{sample.name}"'
        report.bad.append(f"{sample.name}{where}: {verdict.kind}: {verdict.text}\n    {alone}")


def suite(samples_each: int, layouts: int) -> dict[str, tuple[Callable[[], Iterable[Sample]], int]]:
    """Return samples by the name of their operation, and in how many layouts to try each."""
    every: dict[str, tuple[Callable[[], Iterable[Sample]], int]] = {
        sample.name: (partial(list, [sample]), HAND_LAYOUTS) for sample in hand_samples()
    }
    for name, op in operations().items():
        every[f"torch {name}"] = partial(samples, f"torch {name}", op, samples_each), layouts
    return every


def main(arguments: Sequence[str]) -> int:
    """Judge a part of the suite; returns 1 if anything is wrong or raw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", default="0/1", help="which part of how many: 0/16")
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)))
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each operation of torch")
    parser.add_argument("--layouts", type=int, default=LAYOUTS, help="of each sample of torch")
    parser.add_argument("--only", action="append", help="a sample or an operation by name")
    parser.add_argument("--out", default="-", help="a file, or - for the terminal")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    part, parts = map(int, options.shard.split("/"))
    degrees = [int(degree) for degree in options.devices.split(",")]
    every = suite(options.samples, options.layouts)
    total = Report()
    with sys.stdout if options.out == "-" else open(options.out, "w") as out:
        for name in list(every)[part::parts]:
            given, layouts = every[name]
            only = [chosen for chosen in options.only or [name] if f"{chosen} ".startswith(f"{name} ")]
            if only:
                print(f"begin {name}", file=out, flush=True)  # a crash of torch leaves this line
                chosen = (sample for sample in given() if name in only or sample.name in only)
                report = judged(chosen, degrees, layouts)
                print("\n".join([f"{name}: {report.totals()}", *report.bad]), file=out, flush=True)
                total.add(report)
        print(f"total: {total.verdicts.total()} cases: {total.totals()}", file=out)
    return 1 if total.bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
