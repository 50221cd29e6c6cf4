"""Compares what DTensor's rules make of an operation with eager, forward and backward, in every layout.

    python -m tests.capture.shard.verified --shard 0/16 --out FILE

FILE has a line for each operation that DTensor shards: its name, a name of torch's database whose samples have it,
and how often it came out equal, wrong or raw. Operations of which nothing is wrong belong into the lists.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import fx

from piper.capture.shard import compute_rules
from piper.capture.shard.dtensor_rules import shard_as_dtensor
from piper.capture.shard.sharder import Sharder
from piper.errors import CaptureError
from piper.ir.sharding import Shard
from tests.capture.shard.samples import operations, samples
from tests.capture.shard.verdict import Sample, combinations, judge, recorded

Verdicts = dict[str, Counter[str]]  # of each operation that DTensor shards, how often each verdict came
SAMPLES, LAYOUTS, DEVICES = 2, 12, (2, 3)


class Every:
    """Holds every name."""

    def __contains__(self, name: object) -> bool:
        return True


@contextmanager
def asked(names: object) -> Iterator[set[str]]:
    """Ask DTensor for the operations named; yields those that it has sharded."""
    answered: set[str] = set()

    def noted(d: Sharder, node: fx.Node) -> None:
        sharded = any(isinstance(d.layouts[source], Shard) for source in node.all_input_nodes)
        shard_as_dtensor(d, node)
        if sharded:
            answered.add(str(node.target))

    with (
        patch.object(compute_rules, "VERIFIED", names),
        patch.object(compute_rules, "shard_as_dtensor", noted),
    ):
        yield answered


def verdicts(given: Iterable[Sample], degrees: Sequence[int], limit: int, names: object) -> Verdicts:
    """Judge samples in many layouts, where DTensor's rules shard an operation of theirs."""
    counts: Verdicts = defaultdict(Counter)
    with asked(names) as answered:
        for sample in given:
            try:
                recording = recorded(sample)
            except CaptureError:
                continue
            for degree in degrees:
                for layouts in combinations(sample.tensors, degree, limit):
                    answered.clear()
                    verdict = judge(sample, recording, layouts, degree)
                    for name in answered:
                        counts[name][verdict.kind] += 1
    return counts


def main(arguments: Sequence[str]) -> int:
    """Judge a part of torch's database."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", default="0/1", help="which part of how many: 0/16")
    parser.add_argument("--out", required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    part, parts = map(int, options.shard.split("/"))
    with open(options.out, "w") as out:
        for name, op in list(operations().items())[part::parts]:
            for target, counts in verdicts(samples(name, op, SAMPLES), DEVICES, LAYOUTS, Every()).items():
                print(f"{target} | {name} | {dict(counts)}", file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
