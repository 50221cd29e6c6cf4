"""How well the simulator foretells: costs from one strategy's profile, steps and memory of others beside it.

Every strategy trains the same small model on processes of this machine. Their steps alternate, so what else
the machine does hits all of them; the processes of those that wait are asleep. A row gives the foretold and
the measured step from its first instruction to its last (the median over rounds), and the peak of live bytes
of the fullest device. `stretch` is the time that chunks took over the time their threads were computing,
which is 1 on a machine without neighbours; `rested` is the error against a measured step divided by it.
"""

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

import piper
from piper.cli.machine import measure
from piper.compiler import Program
from piper.directives import Directive
from piper.models import decoder
from piper.plan.plan import Plans
from piper.run.launch import launch_inline, launch_local
from piper.runtime.recorders import WARM
from piper.runtime.worker import Options
from piper.simulate.calibrate import calibrate
from piper.simulate.measured import Measured
from piper.simulate.profile import Profile
from piper.simulate.simulate import simulate
from piper.train.measure import profile_of
from piper.workers.inline import InlineWorkerGroup
from piper.workers.transport.fork_server import ForkServer
from tests.runtime.memory_meter import measured, meter_of

CONFIG = decoder.Config(vocab=512, dim=192, layers=8, heads=6, kv_heads=6, head_dim=32, hidden=512, stages=4)
BATCH, LENGTH, PARTS = 16, 64, 8
CALIBRATION = "interleaved 1f1b"
TIME_BAR, MEMORY_BAR = 0.10, 0.02


def batches() -> Iterator[dict[str, Tensor]]:
    """The same batch for ever."""
    tokens = torch.randint(CONFIG.vocab, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    while True:
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def pipeline(
    schedule: Sequence[Directive], *, v_shape: bool, each: int = 1, parts: int = PARTS
) -> list[Directive]:
    """Four stages on two ranks of `each` devices, in turns or there and back."""
    home = (0, 1, 1, 0) if v_shape else (0, 1, 0, 1)
    places = [
        piper.replicate(piper.at(PP=stage), range(home[stage] * each, (home[stage] + 1) * each))
        for stage in range(4)
    ]
    return [*places, piper.split(piper.at(), parts=parts), *schedule]


def replicas(zero: int, parts: int) -> list[Directive]:
    """Two devices with half of the batch each, in parts."""
    split = [piper.split(piper.at(), parts=parts)] if parts > 1 else []
    return [piper.replicate(piper.at(), [0, 1], zero=zero), *split]


def strategies() -> dict[str, list[Directive]]:
    """What is calibrated on, then what is foretold."""
    schedules = piper.schedules
    return {
        CALIBRATION: pipeline(schedules.interleaved_1f1b(2, PARTS), v_shape=False),
        "interleaved zero bubble": pipeline(schedules.interleaved_zero_bubble(2, PARTS), v_shape=False),
        "zbv": pipeline(schedules.zbv(2, PARTS), v_shape=True),
        "dualpipe-v": pipeline(schedules.dualpipe_v(2, PARTS), v_shape=True),
        "data parallel, zero=1": replicas(1, PARTS // 2),
        "data parallel, zero=3": replicas(3, PARTS // 2),
        "data parallel, one part": replicas(0, 1),
        "1f1b x 2, four processes": pipeline(
            schedules.interleaved_1f1b(2, PARTS // 2), v_shape=False, each=2, parts=PARTS // 2
        ),
    }


def program_of(strategy: list[Directive]) -> Program:
    """The small model under a strategy."""
    job = piper.Job(
        model=lambda: decoder.Decoder(CONFIG),
        loss=decoder.token_loss,
        data=batches,
        strategy=strategy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    )
    return piper.compile(job, device="cpu")


def measured_profiles(programs: dict[str, Program], rounds: int) -> dict[str, Profile]:
    """The steps of every strategy, in turns."""
    with ExitStack() as held:
        forks = held.enter_context(closing(ForkServer()))
        options = Options(profile=rounds)
        runs = {n: held.enter_context(launch_local(p, options, forks)) for n, p in programs.items()}
        for batch in islice(batches(), rounds + WARM):
            for run in runs.values():
                run.step(batch)
        return {name: profile_of(run, programs[name], name, "local") for name, run in runs.items()}


def measured_peak(program: Program) -> int:
    """The most live bytes of one device's slots, as counted while it runs."""
    with measured(), launch_inline(program, Options()) as run:
        for batch in islice(batches(), 2):
            run.step(batch)
        workers = cast(InlineWorkerGroup, run.session.group).workers.values()
        return max(max(meter_of(worker).live) for worker in workers)


def foretold(program: Program, costs: Measured) -> tuple[float, int]:
    """The step and the peak of slots, by the simulator."""
    found = simulate(slots_only(program.plans), program.outline, costs)
    return found.step, max(memory.peak - memory.resident for memory in found.memories)


def slots_only(plans: Plans) -> Plans:
    """Plans without workspaces: what lives only inside a kernel is not counted while it runs either."""
    bare = (replace(plan, instrs=tuple(replace(ins, workspace=0) for ins in plan.instrs)) for plan in plans)
    return replace(plans, plans=tuple(bare))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy."""

    name: str
    foretold: float
    measured: float
    stretch: float
    rested: float
    foretold_peak: int
    measured_peak: int

    @property
    def error(self) -> float:
        return self.foretold / self.measured - 1

    @property
    def rested_error(self) -> float:
        return self.foretold / self.rested - 1

    @property
    def memory_error(self) -> float:
        return self.foretold_peak / self.measured_peak - 1


def stretches(profile: Profile) -> list[float]:
    """By how much neighbours slowed a strategy's chunks down, step by step.

    Where a strategy has more processes than there are cores, they are neighbours of each other by design.
    """
    own = max(1.0, len(profile.tracks) / (os.cpu_count() or 1))
    steps = []
    for step in range(profile.count):
        rows = [
            (end - start, busy)
            for track in profile.tracks
            for ins, (start, end, busy) in zip(
                profile.plans.of(track.device).instrs, track.steps[step], strict=True
            )
            if ins.op == "compute"
        ]
        steps.append(sum(took for took, _ in rows) / sum(busy for _, busy in rows) / own)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    programs = {name: program_of(strategy) for name, strategy in strategies().items()}
    machine = measure()  # the pipeline of the calibration says nothing of reductions and gathers
    profiles = measured_profiles(programs, options.rounds)
    costs = calibrate(profiles[CALIBRATION], cores=os.cpu_count() or 1, cluster=machine)
    print(f"costs from {CALIBRATION}: {len(costs.chunks)} chunks, gap {costs.gap * 1e6:.0f} us, ", end="")
    print(f"wake {costs.wake * 1e6:.0f} us; {options.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'strategy':26} {'foretold':>9} {'measured':>9} {'error':>7} {'stretch':>7} {'rested':>7} ", end=""
    )
    print(f"{'foretold':>10} {'measured':>10} {'error':>7}")
    for name, program in programs.items():
        times = [profiles[name].seconds(step) for step in range(profiles[name].count)]
        stretched = stretches(profiles[name])
        step, peak = foretold(program, costs)
        row = Row(
            name=name,
            foretold=step,
            measured=statistics.median(times),
            stretch=statistics.median(stretched),
            rested=statistics.median(time / by for time, by in zip(times, stretched, strict=True)),
            foretold_peak=peak,
            measured_peak=measured_peak(program),
        )
        good = abs(row.error) <= TIME_BAR and abs(row.memory_error) <= MEMORY_BAR
        note = "calibration" if name == CALIBRATION else "" if good else "over the bar"
        print(
            f"{row.name:26} {1e3 * row.foretold:6.0f} ms {1e3 * row.measured:6.0f} ms "
            f"{100 * row.error:+6.1f}% {row.stretch:7.2f} {100 * row.rested_error:+6.1f}% "
            f"{row.foretold_peak / 2**20:6.1f} MiB "
            f"{row.measured_peak / 2**20:6.1f} MiB {100 * row.memory_error:+6.1f}%  {note}"
        )


if __name__ == "__main__":
    main()
