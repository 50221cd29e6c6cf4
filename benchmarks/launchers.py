"""What it costs to start workers and to ask them for a step: threads, processes, Ray.

Four workers train a model so small that a step is almost nothing but the asking. The launchers run side
by side and take turns, so that what else the machine does falls on all of them.

    OMP_NUM_THREADS=1 python benchmarks/launchers.py [rounds]
"""

import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

import piper
from piper.run.launch import On, launch

ROUNDS, STEPS = 9, 20
LAUNCHERS: tuple[On, ...] = ("inline", "local", "ray")
MOST = 5.0  # milliseconds that Ray may add to a step


class Net(nn.Module):
    """Two layers, a stage each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP"):
            x = torch.tanh(self.a(x))
        with piper.annotate("PP"):
            result: Tensor = self.b(x)
        return result


def batch() -> dict[str, Tensor]:
    return {"x": torch.ones(8, 16)}


def job() -> piper.Job:
    def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01)

    return piper.Job(
        model=Net,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [batch()],
        strategy=[piper.replicate(piper.at(PP=0), [0, 1]), piper.replicate(piper.at(PP=1), [2, 3])],
        optimizer=sgd,
    )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    program, given = piper.compile(job()), batch()
    times: dict[str, list[float]] = {on: [] for on in LAUNCHERS}
    with ExitStack() as held:
        runs = {}
        for on in LAUNCHERS:
            begun = time.perf_counter()
            runs[on] = held.enter_context(launch(program, on))
            runs[on].step(given)
            print(f"{on:7} first step after {time.perf_counter() - begun:6.2f} s")
        for _ in range(rounds):
            for on, run in runs.items():
                begun = time.perf_counter()
                for _ in range(STEPS):
                    run.step(given)
                times[on].append((time.perf_counter() - begun) / STEPS * 1e3)
    medians = {on: statistics.median(found) for on, found in times.items()}
    for on in LAUNCHERS:
        found = times[on]
        print(f"{on:7} {medians[on]:6.2f} ms a step (least {min(found):.2f}, most {max(found):.2f})")
    extra = statistics.median(more - less for more, less in zip(times["ray"], times["local"], strict=True))
    print(f"ray adds {extra:.2f} ms to a step of local with 4 workers (bar: {MOST:g} ms)")


if __name__ == "__main__":
    main()
