"""A run's folder: its recipe, versions, metrics and checkpoints, and the lock that keeps others out.

recipe.py     the recipe's source         strategy.txt  its directives       plan.txt  the plans in full
run.json      recipe, seed, versions      metrics.jsonl one object a step    checkpoints/
view.json     what made the plans' nodes, and what chunks cost, for `piper view`
events.jsonl  what happened to workers, where anything did      evaluations.jsonl  likewise
run.lock      held while the run lasts: who runs in the folder
"""

import errno
import fcntl
import json
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self, assert_never

from piper.compiler import Program
from piper.compiler.notebook import provenance_of
from piper.errors import CONTENT, ConfigError, file_errors
from piper.ir.devices import show
from piper.ir.format import count, listed
from piper.job import Job, strategy_of
from piper.plan.text import show_plans
from piper.recipe import file_and_function
from piper.run.run_events import Event
from piper.version import VERSION
from piper.view.provenance import FILE, METRICS, Provenance, show_background

RUNS = "runs"  # where folders without a given name go
EVALUATIONS, EVENTS, ABOUT = "evaluations.jsonl", "events.jsonl", "run.json"
PACKAGES = ("torch", "numpy", "transformers", "ray")
SHOWN = 0.1  # seconds of waiting for agents that the display shows


def choose(out: Path | None, recipe: str, resume: bool) -> Path:
    """Return a run's folder: `out`, else `runs/recipe-function`, numbered; a resumed run takes the last."""
    if out is not None:
        return out
    file, function = file_and_function(recipe)
    base = f"{Path(file).stem}-{function}"
    taken = sorted(
        int(match[1] or 1)
        for path in Path(RUNS).glob(f"{base}*")
        if (match := re.fullmatch(re.escape(base) + r"(?:-(\d+))?", path.name))
    )
    number = (taken[-1] if taken else 1) if resume else (taken[-1] + 1 if taken else 1)
    return Path(RUNS) / (base if number == 1 else f"{base}-{number}")


def claim(folder: Path) -> None:
    """Make the folder of a run; refuse one that holds files that no run of ours has written."""
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = sorted(path.name for path in folder.iterdir())
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    with suppress(OSError):  # a run of an older Piper has no lock
        lock = (folder / LOCK).read_bytes()
        if read_lock(lock) is not None or (not lock and names == [LOCK]):
            return
    if names and not {"recipe", "seed", "versions"} <= read_about(folder).keys():
        raise ConfigError(
            "this folder holds files that are not a run's",
            by=str(folder),
            facts={"has": listed(names)},
            hint="name a new or empty folder: --out DIR",
        )


def read_about(folder: Path) -> dict[str, object]:
    """Return the record of the run in a folder. Empty: there is none, as in a run that was killed early."""
    with suppress(OSError, ValueError):
        if isinstance(about := json.loads((folder / ABOUT).read_bytes()), dict):
            return about
    return {}


def prepare(folder: Path, job: Job, resume: bool) -> None:
    """Refuse a folder that holds another run."""
    if not resume and (folder / METRICS).exists():
        raise ConfigError(
            "this folder holds a run already",
            by=str(folder),
            facts={"has": METRICS},
            hint="add --resume to go on with it, or name another folder with --out",
        )
    if resume and (seed := read_about(folder).get("seed")) not in (None, job.seed):
        raise ConfigError(
            "the run was started with another seed, so its samples came in another order",
            by=str(folder),
            facts={"run": f"seed {seed}", "job": f"seed {job.seed}"},
            hint="put the seed back, or start a run of its own with another --out",
        )


def writing(folder: Path) -> AbstractContextManager[None]:
    """Report what cannot be written to a run's folder inside the block."""
    hint = "name a folder you own, on a disk with room: --out DIR"
    return file_errors("the run's folder cannot be written", folder, hint)


def record(folder: Path, program: Program, recipe: str, on: str, steps: int) -> None:
    """Write the record of a run: its recipe, strategy, plans and versions."""
    job = program.job
    installed = {"python": platform.python_version(), "piper": VERSION}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    about = {
        "recipe": recipe,
        "on": on,
        "steps": steps,
        "seed": job.seed,
        "precision": job.precision,
        "devices": show(program.plans.devices),
        "versions": installed,
    }
    directives = (f"{each.title(number)}: {each!r}\n" for number, each in enumerate(strategy_of(job)))
    with writing(folder):
        keep_recipe(Path(file_and_function(recipe)[0]), folder)
        texts = {
            "strategy.txt": "".join(directives) or "one device\n",
            "plan.txt": show_plans(program.plans),
            FILE: show_background(background_of(program, recipe), program.plans),
            ABOUT: json.dumps(about, indent=2) + "\n",
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")


def background_of(program: Program, recipe: str) -> Provenance:
    """Return the model, directives and costs of a program, and the text of its recipe."""
    file, function = file_and_function(recipe)
    return replace(
        provenance_of(program, program.work, f"{Path(file).name}:{function}"),
        source=Path(file).read_text(encoding="utf-8", errors="replace"),  # Python reads other encodings too
        source_name=Path(file).name,
    )


def keep_recipe(source: Path, folder: Path) -> None:
    """Copy a recipe's source into the run's folder. An earlier copy that differs is kept under a number."""
    target, number = folder / "recipe.py", 1
    if target.exists():
        if source.samefile(target) or source.read_bytes() == target.read_bytes():
            return
        while (earlier := folder / f"recipe-{number}.py").exists():
            number += 1
        target.rename(earlier)
    shutil.copyfile(source, target)


class LinesFile:
    """A file with one object on each line, which is on disk before the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *objects: Mapping[str, object]) -> None:
        """Add a line for each object. Make the file if there is none."""
        with writing(self.path.parent), self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(fields) + "\n" for fields in objects)

    def keep(self, done: int) -> Self:
        """Keep the lines of `done` steps: a resumed run writes the later ones again. Drop a line cut off."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        kept = ""
        for line in text.splitlines(keepends=True):
            with suppress(ValueError, KeyError, TypeError):
                kept += line if int(json.loads(line)["step"]) <= done else ""
        if kept != text:
            with writing(self.path.parent):
                partial = self.path.with_name(f".{self.path.name}.part")
                partial.write_text(kept, encoding="utf-8")
                partial.replace(self.path)  # a kill leaves the earlier lines
        return self


class EventLog:
    """Writes events to the run's folder as they come. The file is made with the first."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.file, self.say = LinesFile(folder / EVENTS), say

    def __call__(self, event: Event) -> None:
        fields = {name: value for name, value in asdict(event).items() if value not in (None, {})}
        self.file.write({"time": round(time.time(), 3), **fields})
        self.say(described(event))


def described(event: Event) -> str:
    """Return an event in one line."""
    match event.event:
        case "failure":
            where = "" if event.instruction is None else f", at {event.instruction}"
            left = f"{event.left} {'retry' if event.left == 1 else 'retries'} left"
            what = f"{event.who}: {event.what}{where}. Recovering, {left}"
        case "warm":
            what = f"the {event.who} is warm after {event.seconds:.1f} s, as a spare"
        case "recovery":
            cold = event.phases.get("warm", 0.0)
            waited = f", of which {cold:.1f} s until agents were warm," if cold >= SHOWN else ""
            again = f"{event.source}, {count(event.replayed or 0, 'step')} repeated"
            after = f"from the state after step {event.version} in {again}"
            what = f"recovered in {event.seconds:.1f} s{waited} {after}"
        case "mismatch":
            return f"Warning: step {event.step} gave another result when it was repeated: {event.what}"
        case "straggler":
            what = f"{event.who} is a straggler: {event.what}"
        case "skipped":
            what = f"{event.who} is passed over: {event.what}"
        case "preemption" | "resize":
            what = str(event.what)
        case _:
            assert_never(event.event)
    return f"Step {event.step}: {what}"


LOCK, FORMAT = "run.lock", "piper run"
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def locked(folder: Path) -> Iterator[str | None]:
    """Hold the lock of a folder, and yield a warning if its file system has no locks.

    The file stays when the lock is released: only the kernel's lock on it counts, so no lock is ever stale.
    """
    path = folder / LOCK
    hint = "name a folder you own, on a disk with room: --out DIR"
    with file_errors("the run's folder cannot be locked", folder, hint):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    warning = None
    with ExitStack() as held:  # closed once: another file may have the number of a descriptor that was closed
        held.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            about = read_lock(os.pread(descriptor, 4096, 0))
            who = f"process {about['pid']} on {about['host']}" if about else "a process that has just started"
            raise ConfigError(
                "another run is using this folder",
                by=str(folder),
                facts={"holder": who},
                hint="wait for it or stop it, or name another folder with --out",
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            warning = f"{folder} cannot be locked ({error.strerror}): start no second run in it"
        # A child shares the lock: one that outlives this process must not hold it.
        os.register_at_fork(after_in_child=held.close)
        mine = {"format": FORMAT, "pid": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(mine) + "\n").encode(), 0)
        yield warning


def read_lock(data: bytes) -> dict[str, object] | None:
    """Return what a lock file says of its holder; None: it is not a lock file of ours."""
    with suppress(*CONTENT):
        about = json.loads(data)
        return about if about["format"] == FORMAT and {"pid", "host"} <= about.keys() else None
    return None
