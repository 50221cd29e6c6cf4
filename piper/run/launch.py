"""Starting a program: on threads, on processes of this machine, on Ray or torchrun, or one of its devices."""

import logging
import os
import sys
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, get_args

from piper.errors import ConfigError, LaunchError
from piper.ir.format import count, size
from piper.plan.memory_timeline import timeline
from piper.run.checkpointing import checkpoints_at
from piper.run.run import Run, start_run
from piper.run.session import Session, Sessions
from piper.runtime.accelerator import accelerators, is_accelerator, module
from piper.runtime.cuda.graph_checks import check_static
from piper.runtime.memory_release import predicted_peak
from piper.runtime.setup import ProgramLike, setup_of
from piper.runtime.worker import Options
from piper.workers.group import Starter
from piper.workers.inline import InlineStarter
from piper.workers.local import LocalStarter
from piper.workers.rank_agent import attend
from piper.workers.rank_environment import RANKS, RankEnvironment, check_size, check_started, rank_environment
from piper.workers.results import Resumed
from piper.workers.serve import crowded
from piper.workers.single_rank import SingleRankGroup, single_rank_error
from piper.workers.torchrun import TorchrunStarter
from piper.workers.transport.fork_server import ForkServer
from piper.workers.transport.versions import Files, Versions

On = Literal["inline", "local", "ray", "torchrun"]
SHARE = ("host", "nccl")  # how devices that share an accelerator exchange values
ALONE = "rank:"  # and the number of a device
DEFAULT = Options()
log = logging.getLogger("piper")


def launch(
    program: ProgramLike,
    on: On | str = "inline",
    *,
    timeout: float = DEFAULT.timeout,
    streams: bool = DEFAULT.streams,
    threads: int = DEFAULT.threads,
    keep_gradients: bool = DEFAULT.keep_gradients,
    keep_outputs: bool = DEFAULT.keep_outputs,
    profile: int = DEFAULT.profile,
    graphs: bool = DEFAULT.graphs,
    share: str = DEFAULT.share,
    cluster: str | None = None,
    resume: Path | str | None = None,
) -> Run:
    """Start a program's workers, and end them with the block.

    Without a block they end with `run.close()`, when nothing refers to the run any more, or with the process.

    on: threads of this process, processes of this machine, Ray, or the ranks of torchrun, which `local` takes
    too where there are any: each has the worker of a device. Rank 0 goes on with the script. In the others
    this does not return: they have workers for all that rank 0 launches, and end when its script has ended.
    Or `rank:N`: device N of the plan alone, with real kernels and memory, and communication that moves
    nothing but takes its time.
    timeout: seconds that any one wait may take before the step ends with an error.
    streams: run streams side by side; otherwise a device does one thing at a time.
    threads: how many threads one computation uses. Runs give the same bits if they use the same number.
    keep_gradients, keep_outputs: keep each step's gradients, or what every chunk returned, to look at them.
    profile: how many steps to time instruction by instruction, after the first few; `run.recordings()`.
    graphs: on CUDA, issue each step as one graph after the first few, so that the host has next to nothing to
    do. The learning rate is then single precision. Not for steps that need the host: experts, dropout.
    share: how devices exchange values where they outnumber accelerators: through the host, with the bits of
    other launchers, or by "nccl" over sockets, as several machines do.
    cluster: the network whose times `rank:N` keeps: a known name, or a TOML file.
    resume: the checkpoint to begin from, or the folder of a run or of checkpoints, of which the newest intact
    one is taken. No process then builds the model: each reads what it needs. `run.train()` goes on as
    `piper train --resume` does. A run that has saved nothing yet starts at its first step.
    """
    given = locals()  # most are fields of a record
    if not hasattr(program, "plans"):
        what = f"{type(program).__name__} is not a compiled program"
        hint = "compile the job first: piper.launch(piper.compile(job))"
        raise ConfigError(what, by="launch", hint=hint)
    begins = resume is not None and bool(checkpoints_at(Path(resume), program.job))
    chosen = {one.name: given[one.name] for one in fields(Options) if one.name in given}
    run = launcher(program, on, Options(**chosen, blank=begins), cluster=cluster)
    try:
        if resume is not None and begins:
            run.load(resume)
        elif resume is not None:
            run.folder = Path(resume)
            log.warning("%s has no complete checkpoint yet: starting at the first step", resume)
    except BaseException:
        run.close()
        raise
    return run


def launcher(program: ProgramLike, on: str, options: Options, *, cluster: str | None = None) -> Run:
    """Start a program by the launcher of a name."""
    check_launcher(on)
    check_share(options.share)
    if options.graphs:
        through = by_host(program, on, options.share)
        check_static(setup_of(program), program.plans, options.looks, by_host=through)
    if on.startswith(ALONE):
        return launch_single_rank(program, on, options, cluster=cluster)
    if (world := ranks_of(on)) is not None and not world.leads:
        check_size(world, len(program.plans.devices))
        sys.exit(attend(world))  # the script goes on in rank 0
    return start_run(Sessions(program, options, starter_of(program, on)))


def launch_inline(program: ProgramLike, options: Options = DEFAULT, versions: Files | None = None) -> Run:
    """Start a program on threads of this process; `versions`: where copies of the state go, if anywhere."""
    starter = InlineStarter(program)
    starter.files = versions
    return start_run(Sessions(program, options, starter))


def launch_local(program: ProgramLike, options: Options = DEFAULT, forks: ForkServer | None = None) -> Run:
    """Start a program on processes of this machine; `forks`: the fork server that several launches share."""
    return start_run(Sessions(program, options, LocalStarter(program, forks=forks)))


def ranks_of(on: str) -> RankEnvironment | None:
    """Return the ranks that have the workers. None: torchrun has started none, or it is another launcher."""
    return rank_environment() if on in RANKS else None


def starter_of(program: ProgramLike, on: str, *, protects: bool = False, spares: int = 0) -> Starter:
    """Return what starts workers; `protects`: with memory for copies; `spares`: workers more than devices."""
    if (world := ranks_of(on)) is not None:
        return TorchrunStarter(program, world, protects, spares)
    if on == "ray":
        from piper.workers.ray import RayStarter

        return RayStarter(program, protects, spares)
    assert on in ("inline", "local"), f"{on} is checked"
    check_machine(program)
    kind = InlineStarter if on == "inline" else LocalStarter
    return kind(program, Versions(program.plans) if protects else None)


def check_launcher(on: str, by: str = "launch") -> None:
    """Refuse a name that no launcher has."""
    if on not in get_args(On) and not on.startswith(ALONE):
        known = (*get_args(On), "rank:N")
        close = get_close_matches(on, known, n=1)
        hint = "on is one of " + ", ".join(known) + (f"; did you mean {close[0]!r}?" if close else "")
        raise ConfigError(f"there is no launcher {on!r}", by=by, hint=hint)
    if on == "torchrun":
        check_started(by)


def check_share(share: str, by: str = "launch") -> None:
    """Refuse a way to share an accelerator that there is not."""
    if share not in SHARE:
        what = f"devices cannot share an accelerator by {share!r}"
        raise ConfigError(what, by=by, hint=f"share is {' or '.join(SHARE)}")


def check_machine(program: ProgramLike) -> None:
    """Refuse a job whose state alone is larger than the memory of this machine, which all devices share."""
    if is_accelerator(program.device):
        return
    residents = [(len(plan.devices), slot) for plan in program.plans for slot in plan.residents.values()]
    needs = sum(devices * slot.nbytes for devices, slot in residents)
    if needs > (has := machine_memory()):
        devices = count(len(program.plans.devices), "device")
        given = f"{size(needs)}: parameters and optimizer state of {devices}"
        raise LaunchError(
            "the job is too large for this machine",
            by="launch",
            facts={"needs": given, "has": size(has)},
            hint="shard more (zero=3), train a smaller model, or take more machines: --on ray, or torchrun",
        )


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def by_host(program: ProgramLike, on: str, share: str = DEFAULT.share) -> bool:
    """Return whether the accelerators of a program exchange values through the host."""
    if on == "inline":
        return is_accelerator(program.device)
    return share == "host" and crowding(program, on) > 0


def crowding(program: ProgramLike, on: str) -> int:
    """Return how many workers of this machine share fewer accelerators; 0 if each has its own, or none."""
    if not is_accelerator(program.device) or on not in RANKS:
        return 0
    world = ranks_of(on)
    workers = len(program.plans.devices) if world is None else world.nearby
    return workers if crowded(workers) else 0


def place_of(program: ProgramLike, on: str, share: str = DEFAULT.share) -> str:
    """Return where a program runs, in words: its figures are not those of an accelerator for each device."""
    ranks = crowding(program, on)
    return f"{on}, {shared_place(ranks, share)}" if ranks else on


def shared_place(ranks: int, share: str) -> str:
    """Return how many ranks share the accelerators of this machine, in words."""
    way = "through the host" if share == "host" else "by NCCL over sockets"
    return f"{count(ranks, 'rank')} on {count(accelerators(), 'GPU')}, {way}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The peak memory of a device, predicted and measured, in bytes."""

    planned: int  # counting in the order of issue
    predicted: int  # with what is held while streams run at the same time
    measured: int | None  # none on a host, which does not count


class SingleRankRun(Run):
    """One device of a job, for its step time and peak memory. Its numbers mean nothing."""

    saves = False

    def __init__(self, group: SingleRankGroup) -> None:
        super().__init__(Sessions(group.program, group.options, Starter(group.program)))
        self.device, self.setup, self.plans = group.device, group.setup, group.program.plans
        self.network, self.engine, self.seconds = group.network, group.engine, group.seconds
        group.begin()
        self.sessions.current = Session(group, self.sessions.repeats)
        self.worker = group.worker

    def peak(self) -> PeakMemory:
        """Return the peak memory so far, predicted and measured."""
        plan = self.worker.env.plan
        measured = None
        if self.engine is not None:
            measured = module(self.setup.device).max_memory_allocated(self.setup.device) - self.engine.nbytes
        return PeakMemory(planned=timeline(plan).peak, predicted=predicted_peak(plan), measured=measured)

    def save(
        self, path: Path | str, *, data: object = None, wait: bool = True, keep: int | None = None
    ) -> None:
        """Refuse to save."""
        raise single_rank_error("there is nothing worth saving")

    def load(self, path: Path | str) -> Resumed:
        """Refuse to load."""
        raise single_rank_error("a checkpoint cannot be loaded")


def launch_single_rank(
    program: ProgramLike, on: str, options: Options | None = None, *, cluster: str | None = None
) -> SingleRankRun:
    """Start one device of a program, `rank:N`, in this process."""
    known, text = program.plans.devices, on.partition(":")[2]
    if not text.isdecimal() or int(text) not in known:
        raise ConfigError(
            f"there is no device {text!r}",
            by=on,
            facts={"devices": f"{known[0]} to {known[-1]}"},
            hint="name one of the plan's devices: --on rank:0",
        )
    return SingleRankRun(SingleRankGroup(program, int(text), options or Options(), cluster))
