"""Run the tests against mutants of `piper/` and tell which survive: `make mutate`.

A copy of the tree is made in a temporary folder, and each mutant is one edit of that copy; the working tree is
never touched. The tests run in a fork of this process, which has imported torch and pytest and nothing of
piper, so a mutant costs the time of its tests and not that of the imports. The tests that a mutant names run
first; only where they pass does the rest of the default run follow.
"""

import argparse
import compileall
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from tests.mutation.mutants import ROOT, Mutant, load_mutants, mutated, source_of

PRELOADED = (  # what most tests import anyway; nothing of piper, of which every mutant needs its own
    "torch",
    "torch._dynamo",
    "torch._dynamo.functional_export",
    "torch._functorch.aot_autograd",
    "torch._inductor.decomposition",
    "torch.distributed.checkpoint.default_planner",
    "torch.distributed.rendezvous",
    "torch.optim",
    "hypothesis",
    "cloudpickle",
    "numpy",
    "pytest",
    "rich.console",
    "rich.table",
    "safetensors.torch",
    "typer",
    "xdist",
)
LEFT_OUT = (".git", ".venv", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "runs", "build")
WANTED = 0.95  # the part of the mutants that must be killed
POLL = 0.02  # seconds between looks at whether a run has ended
OURS = re.compile(r"(piper|tests|recipes|benchmarks)(\.|$)")  # modules that a mutated tree brings itself
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)

Fate = Literal["killed", "survived", "equivalent", "broken"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a mutant."""

    id: str
    file: str
    fate: Fate
    by: str = ""  # the test that failed; the reason of a survivor
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Running:
    """A fork that runs tests."""

    pid: int
    log: Path
    began: float
    until: float
    code: int | None = None
    late: bool = False

    def over(self) -> bool:
        """Look whether it has ended; one that is late is killed, with all that it started."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
            return True
        if time.monotonic() > self.until:
            self.late = True
            os.killpg(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
            return True
        return False

    def failed_test(self) -> str:
        """Return the first test that failed."""
        if self.late:
            return "a timeout"
        found = FAILED.search(self.log.read_text(encoding="utf-8", errors="replace"))
        return found[1] if found else f"exit code {self.code}"


class Edit:
    """A mutant's edit in one copy of the tree, which can be taken back."""

    def __init__(self, mutant: Mutant, tree: Path) -> None:
        self.path = source_of(mutant, tree)
        self.text = self.path.read_text(encoding="utf-8")
        self.time = self.path.stat().st_mtime_ns
        cached = self.path.parent.glob(f"__pycache__/{self.path.stem}.*.pyc")
        self.cached = {path: path.read_bytes() for path in cached}
        self.path.write_text(mutated(self.text, mutant), encoding="utf-8")
        for path in self.cached:  # Python would take it, if the edit is of one length and in one second
            path.unlink()

    def undo(self) -> None:
        """Put the file back, with the time that its bytecode was compiled for."""
        self.path.write_text(self.text, encoding="utf-8")
        os.utime(self.path, ns=(self.time, self.time))
        for path, code in self.cached.items():
            path.write_bytes(code)


@dataclass(slots=True, kw_only=True)
class Trial:
    """A mutant that is being tried in one copy of the tree."""

    mutant: Mutant
    tree: Path
    edit: Edit
    running: Running
    began: float = field(default_factory=time.monotonic)
    everything: bool = False  # the targeted tests have passed


def preload() -> None:
    """Import what is worth importing once, and let forks share it."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def copied_tree(source: Path, target: Path) -> Path:
    """Copy a tree, without what tests do not need."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    compileall.compile_dir(target / "piper", quiet=2)
    return target


def run_tests(
    tree: Path, tests: Sequence[str], log: Path, timeout: float, *, unchanged: bool = False
) -> Running:
    """Run tests of a tree in a fork of this process. An unchanged tree may keep its bytecode."""
    pid = os.fork()
    if not pid:
        in_fork(tree, tests, log, unchanged)
    now = time.monotonic()
    return Running(pid=pid, log=log, began=now, until=now + timeout)


def in_fork(tree: Path, tests: Sequence[str], log: Path, unchanged: bool) -> NoReturn:
    """Be the fork: see no tree but this one, run its tests, and end with their exit code."""
    code = 70
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "" if unchanged else "1"}
        sys.dont_write_bytecode = not unchanged
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if OURS.match(name)]:
            del sys.modules[name]
        importlib.invalidate_caches()
        import pytest

        options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line", f"--rootdir={tree}"]
        code = int(pytest.main([*options, *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


class Runner:
    """Tries mutants, as many at a time as there are copies of the tree."""

    def __init__(self, folder: Path, *, timeout: float, targeted_only: bool) -> None:
        self.folder, self.timeout, self.targeted_only = folder, timeout, targeted_only
        self.free: list[Path] = []
        self.trials: list[Trial] = []

    def add_trees(self, count: int) -> None:
        """Make copies of the tree; those after the first have the bytecode that it has."""
        for _ in range(count):
            self.free.append(
                copied_tree(self.free[0] if self.free else ROOT, self.folder / f"tree{len(self.free)}")
            )

    def failing_without(self, mutants: Sequence[Mutant]) -> str:
        """Return the first targeted test that fails with no mutant at all, or nothing."""
        tests = sorted({test for mutant in mutants for test in mutant.tests})
        log = self.folder / "unchanged.log"
        running = run_tests(self.free[0], tests, log, 60.0 * (1 + len(tests)), unchanged=True)
        while not running.over():
            time.sleep(POLL)
        return "" if running.code == 0 else running.failed_test()

    def run(self, mutants: Sequence[Mutant]) -> Iterator[Verdict]:
        """Try every mutant; what became of each, as it is known."""
        waiting = list(mutants)
        while waiting or self.trials:
            while waiting and self.free:
                self.trials.append(self._begin(waiting.pop(0), self.free.pop()))
            for trial in [trial for trial in self.trials if trial.running.over()]:
                verdict = self._judge(trial)
                if verdict is not None:
                    self.trials.remove(trial)
                    trial.edit.undo()
                    self.free.append(trial.tree)
                    yield verdict
            time.sleep(POLL)

    def _begin(self, mutant: Mutant, tree: Path) -> Trial:
        edit = Edit(mutant, tree)
        running = run_tests(tree, mutant.tests, self.folder / f"{mutant.id}.log", self.timeout)
        return Trial(mutant=mutant, tree=tree, edit=edit, running=running)

    def _judge(self, trial: Trial) -> Verdict | None:
        """Return what became of a mutant whose tests have ended; none: the rest of the tests follows."""
        mutant, running = trial.mutant, trial.running
        seconds = time.monotonic() - trial.began
        fate: Fate = "killed"
        by = running.failed_test() if running.code else ""
        if running.code == 5:
            fate, by = "broken", "its tests are not there"
        elif not running.code:
            if not (self.targeted_only or mutant.equivalent or trial.everything):
                trial.everything = True
                log = self.folder / f"{mutant.id}.all.log"
                trial.running = run_tests(trial.tree, ["tests"], log, 60 * self.timeout)
                return None
            fate = "equivalent" if mutant.equivalent else "survived"
            by = mutant.equivalent
        return Verdict(id=mutant.id, file=mutant.file, fate=fate, by=by, seconds=round(seconds, 1))


def changed_since(revision: str) -> set[str]:
    """Return the files that differ from a revision, from the root."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", revision]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def chosen(mutants: Sequence[Mutant], asked: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that are asked for: all, or some by id, by package or by what has changed."""
    changed = changed_since(asked.since) if asked.since else None
    return [
        mutant
        for mutant in mutants
        if (not asked.only or mutant.id in asked.only)
        and (not asked.package or mutant.package in asked.package)
        and (
            changed is None
            or mutant.file in changed
            or any(test.partition("::")[0] in changed for test in mutant.tests)
        )
    ]


def told(verdicts: Sequence[Verdict]) -> tuple[str, bool]:
    """Return the summary in words, and whether enough mutants were killed."""
    killed = sum(verdict.fate == "killed" for verdict in verdicts)
    share = killed / len(verdicts) if verdicts else 1.0
    lines = [f"{killed} of {len(verdicts)} mutants killed ({share:.1%})"]
    for fate, title in (("equivalent", "equivalent"), ("survived", "survived"), ("broken", "broken")):
        lines += [
            f"  {title}: {v.id} in {v.file}" + (f": {v.by}" if v.by else "")
            for v in verdicts
            if v.fate == fate
        ]
    unexplained = any(verdict.fate in ("survived", "broken") for verdict in verdicts)
    return "\n".join(lines), share >= WANTED and not unexplained


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="make mutate", description="Run the tests against mutants of piper/."
    )
    parser.add_argument("--only", action="append", metavar="ID", help="this mutant; may be given again")
    parser.add_argument("--package", action="append", metavar="P", help="mutants of this package: plan, api")
    parser.add_argument("--since", metavar="REV", help="mutants whose file, or whose tests, differ from REV")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time (1)")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="for targeted tests (180)")
    parser.add_argument("--targeted-only", action="store_true", help="do not go on to the rest of the tests")
    parser.add_argument(
        "--skip-baseline", action="store_true", help="take it that the tests pass without mutants"
    )
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write what became of each as JSON")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what pytest printed in this folder")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Try mutants: 0 if enough are killed, 1 if not, 2 if the list or the tests are at fault."""
    asked = arguments(given)
    mutants = chosen(load_mutants(), asked)
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    preload()
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        runner = Runner(Path(folder), timeout=asked.timeout, targeted_only=asked.targeted_only)
        runner.add_trees(1)
        baseline = not asked.skip_baseline
        if failing := runner.failing_without(mutants) if mutants and baseline else "":
            sys.stderr.write(f"{failing} fails without any mutant: mend that first\n")
            return 2
        runner.add_trees(asked.jobs - 1)
        for verdict in runner.run(mutants):
            verdicts.append(verdict)
            sys.stdout.write(f"{verdict.fate:10} {verdict.seconds:6.1f} s  {verdict.id}  {verdict.by}\n")
            sys.stdout.flush()
        if asked.logs is not None:
            asked.logs.mkdir(parents=True, exist_ok=True)
            for log in Path(folder).glob("*.log"):
                shutil.copy(log, asked.logs / log.name)
    text, enough = told(verdicts)
    sys.stdout.write(text + "\n")
    if asked.summary is not None:
        asked.summary.parent.mkdir(parents=True, exist_ok=True)
        asked.summary.write_text(json.dumps([asdict(v) for v in verdicts], indent=1) + "\n", encoding="utf-8")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
