"""The parts of `piper selftest`, one after another. A part that fails does not stop the others."""

import importlib.metadata
import os
import platform
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import median
from time import perf_counter

import torch

from piper.errors import ConfigError
from piper.ir.format import count, size
from piper.models import decoder
from piper.run.launch import shared_place
from piper.runtime.accelerator import KINDS, accelerators, device_kind, is_accelerator, module
from piper.selftest.comm_cases import CASES
from piper.selftest.compositions import TOLERANCE, compared, compositions, killed_and_recovered
from piper.selftest.peers import PEERS, Training, compare
from piper.selftest.rank_process import LARGE, Processes, measured_collectives, measured_links
from piper.selftest.selftest_page import Part, ResultRow, SelftestPage
from piper.version import VERSION
from piper.workers.rank_environment import check_alone
from piper.workers.serve import crowded
from piper.workers.transport.fork_server import ForkServer

PROCESS = "piper.selftest.rank_process"  # the module of the processes that are started
PACKAGES = ("ray", "transformers", "triton")  # none of which it needs
BOUND = 120.0  # seconds that a rank may take for one call
TIMEOUT = 60.0  # seconds of one communication
USUAL = 4  # ranks, where there are not several accelerators
ROUNDS = {False: 7, True: 20}  # of steps that are timed beside torch, by `Machine.apart`
LOSSES = 1e-4  # how far losses may be apart in float32, relative
SLOW = 2.0  # times the median seconds of a byte: such a link is named
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The ranks of a self-test and what starts them."""

    devices: int
    kind: str
    compiled: bool
    forks: ForkServer
    processes: Processes

    @property
    def apart(self) -> bool:
        """Return whether each rank has an accelerator of its own."""
        return is_accelerator(self.kind) and not crowded(self.devices)

    @property
    def place(self) -> str:
        """Return where the ranks run, in words."""
        if not is_accelerator(self.kind):
            return f"{count(self.devices, 'rank')} on the host, over gloo"
        if not self.apart:
            return shared_place(self.devices, "nccl")
        backend = torch.distributed.get_default_backend_for_device(self.kind).upper()
        return f"{count(self.devices, 'rank')} on {count(self.devices, 'GPU')}, by {backend}"


def versions(machine: Machine) -> Iterator[ResultRow]:
    """Say what runs where."""
    facts = {
        "piper": VERSION,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores ({platform.machine()})",
    }
    if is_accelerator(machine.kind):
        there = module(torch.device(machine.kind))
        names = [there.get_device_name(number) for number in range(accelerators())]
        grouped = (f"{len([*same])} x {name}" for name, same in groupby(names))
        free, whole = there.mem_get_info()
        facts["GPUs"] = ", ".join(grouped)
        facts["memory of the first"] = f"{size(free)} of {size(whole)} free"
        facts |= KINDS[machine.kind].versions()
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed; nothing here needs it"
    yield from (ResultRow(name=name, figures={"is": fact}) for name, fact in facts.items())


def links(machine: Machine) -> Iterator[ResultRow]:
    """Measure the link from each rank to the next."""
    meeting = machine.processes.meet(machine.devices, TIMEOUT)
    measured = [*measured_links(machine.processes, meeting)]
    usual = median(line.slope for line in measured)
    for source, line in enumerate(measured):
        slow = "less than half of the median" if line.slope > SLOW * usual else ""
        bandwidth = {"bytes_per_s": 1 / line.slope} if line.slope else {}
        name = f"{source} to {(source + 1) % machine.devices}"
        yield ResultRow(name=name, figures={"latency_s": line.base, **bandwidth, "note": slow})


def collectives(machine: Machine) -> Iterator[ResultRow]:
    """Compare every collective with values computed here, and time it."""
    crew = machine.processes.crew(machine.devices, TIMEOUT, keep=True)
    problems: dict[str, list[list[str]]] = {}  # of the cases of each collective
    for case in CASES:
        problems.setdefault(case.collective, []).append(case.problems(crew))
    meeting = machine.processes.meet(machine.devices, TIMEOUT)
    measured = measured_collectives(machine.processes, meeting)
    for name, cases in problems.items():
        wrong = [problem for found in cases for problem in found]
        figures: dict[str, float | str] = {"cases": len(cases)}
        if name in measured:
            spent, bandwidth = measured[name]
            figures |= {"step_s": spent, "nbytes": LARGE[meeting.apart], "bytes_per_s": bandwidth}
        yield ResultRow(name=name, figures=figures, ok=not wrong, why="; ".join(wrong[:3]))


def composed(machine: Machine) -> Iterator[ResultRow]:
    """Compare compositions with one device."""
    for composition in compositions(machine.devices):
        begin = perf_counter()
        try:
            report = compared(composition, machine.devices, machine.kind, machine.forks)
        except Exception as error:  # noqa: BLE001  it is the result of this composition
            yield ResultRow(name=composition.name, ok=False, why=text_of(error))
            continue
        apart = max(report.max_loss_diff, report.max_grad_diff, report.max_param_diff)
        figures = {"difference": apart, "took_s": perf_counter() - begin}
        why = "" if report.ok else report.verdict
        yield ResultRow(name=composition.name, figures=figures, ok=report.ok, why=why)


def killed(machine: Machine) -> Iterator[ResultRow]:
    """Kill a worker in the middle of a step."""
    figures = killed_and_recovered(machine.devices, machine.kind)
    ok = figures["difference"] <= TOLERANCE
    name = f"SIGKILL to device {machine.devices // 2} of {machine.devices}"
    yield ResultRow(
        name=name, figures=figures, ok=ok, why="" if ok else "the losses are not those of one device"
    )


def beside_torch(machine: Machine) -> Iterator[ResultRow]:
    """Train the same model with torch's own means, in turns."""
    training, rounds = training_for(machine), ROUNDS[machine.apart]
    for peer in PEERS:
        try:
            both = compare(peer, training, rounds, machine.processes)
        except Exception as error:  # noqa: BLE001  it is the result of this row
            yield ResultRow(name=peer.title, ok=False, why=text_of(error))
            continue
        ok, medians = both.apart <= LOSSES, {"piper_s": median(both.ours), "torch_s": median(both.theirs)}
        figures = {**medians, "ratio": both.ratio, "difference": both.apart}
        why = "" if ok else "the losses of both sides differ"
        yield ResultRow(name=peer.title, figures=figures, ok=ok, why=why)


def training_for(machine: Machine) -> Training:
    """Return a decoder whose heads, vocabulary, layers and positions all ranks can divide."""
    n, large = machine.devices, machine.apart
    least, width, length = (16, 64, 512) if large else (4, 32, 32)
    heads = -(-least // n) * n
    config = decoder.Config(
        vocab=n * (4096 if large else 64), layers=n * (2 if large else 1), dim=heads * width,
        heads=heads, kv_heads=heads, head_dim=width, hidden=3 * heads * width,
    )  # fmt: skip
    return Training(
        config=config, ranks=n, samples=4 * n, length=-(-length // n) * n, microbatches=2 * n,
        compiled=machine.compiled,
    )  # fmt: skip


PARTS: dict[str, tuple[Part, Callable[[Machine], Iterator[ResultRow]]]] = {
    "versions": (Part(title="Versions", first="", columns={"is": ""}), versions),
    "links": (Part(
        title="Links", first="ranks", about="From each rank to the next, one at a time.",
        columns={"latency_s": "latency", "bytes_per_s": "bandwidth", "note": ""},
    ), links),
    "collectives": (Part(
        title="Collectives", first="collective",
        columns={"cases": "cases compared", "nbytes": "tensor", "step_s": "time", "bytes_per_s": "bandwidth"},
        about="Against values computed on one host: several types, uneven lengths, no rows. "
              "The bandwidth is that of each rank's link.",
    ), collectives),
    "compositions": (Part(
        title="Compositions", first="strategy",
        columns={"difference": "largest difference", "took_s": "took"},
        about="Two float64 steps against plain PyTorch on one device: losses, gradients, parameters.",
    ), composed),
    "kill": (Part(
        title="A killed worker", first="signal",
        columns={"recovered_s": "to the end of the step", "step_s": "an ordinary step",
                 "difference": "losses apart"},
        about="In the middle of a step. The run replaces it, repeats the step, and trains on.",
    ), killed),
    "torch": (Part(
        title="Beside torch", first="peer",
        columns={"piper_s": "piper", "torch_s": "torch", "ratio": "ratio", "difference": "losses apart"},
        about="Medians of steps that both sides take in turns: the same model, weights and batch. "
              "All is float32. Ratios are no part of the verdict.",
    ), beside_torch),
}  # fmt: skip


def text_of(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[-2000:]


def run_part(part: Part, find: Callable[[Machine], Iterator[ResultRow]], machine: Machine) -> Part:
    """Run a part. What it raises is its last row."""
    begin, rows = perf_counter(), list[ResultRow]()
    try:
        rows.extend(find(machine))
    except Exception as error:  # noqa: BLE001  it is the result of this part
        rows.append(ResultRow(name=part.title, ok=False, why=text_of(error)))
    return replace(part, rows=tuple(rows), seconds=perf_counter() - begin)


def cpu_seconds() -> float:
    """Return the seconds that this process and those that have ended under it have computed."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def selftest(
    devices: int | None = None,
    *,
    device: str | None = None,
    compiled: bool = False,
    only: Sequence[str] = (),
    progress: Progress = lambda text: None,
    process: str = PROCESS,
) -> SelftestPage:
    """Try this machine, and return a page that says what was found.

    devices: how many ranks; else one on each accelerator, or 4 where there are not several. only: parts to
    run. process: the module of the processes that are started.
    """
    by = "piper selftest"
    check_alone(by)
    for name in only:
        if name not in PARTS:
            raise ConfigError(f"there is no part {name!r}", by=by, hint=f"parts are {', '.join(PARTS)}")
    kind = device_kind(device)
    cards = accelerators() if is_accelerator(kind) else 0
    ranks = devices or (cards if cards > 1 else USUAL)
    begin, cpu = perf_counter(), cpu_seconds()
    with closing(ForkServer(process)) as forks, closing(Processes(forks, ranks, BOUND, kind)) as processes:
        machine = Machine(devices=ranks, kind=kind, compiled=compiled, forks=forks, processes=processes)
        place, parts = machine.place, list[Part]()
        progress(place)
        for name in only or PARTS:
            part = run_part(*PARTS[name], machine)
            progress(f"{part.title}: {part.seconds:.1f} s, {'passed' if part.ok else 'FAILED'}")
            parts.append(part)
    skipped = [f"{name}: not asked for" for name in PARTS if only and name not in only]
    if kind == "cpu":
        skipped.append("GPUs: " + ("left out by --device cpu" if accelerators() else "torch finds none here"))
    elif crowded(ranks):
        skipped.append("an accelerator for each rank: these figures say nothing of NVLink or PCIe")
    return SelftestPage(
        place=place, compiled=compiled, parts=tuple(parts), skipped=tuple(skipped),
        seconds=perf_counter() - begin, cpu_seconds=cpu_seconds() - cpu,
    )  # fmt: skip
