"""The time from a job to the end of its first step, split into parts, from an empty and from a filled cache.

Every measurement is a process of its own; each side has its own caches. `imports`, that of Inductor too, is
no part of a total: both sides pay it. All sides draw initial values on the device; `host` is ours with values
drawn on the host. `profile` lists the functions that take the time of a warm start. `steps` trains both sides
in turns in one process, from the caches that the sides before it have filled. Its `first` is the time to the
end of a side's first step there; the second side has less to import.

    python benchmarks/gpu_first_step.py --out benchmarks/results/gpu_first_step.txt
    python benchmarks/gpu_first_step.py --device cpu --dim 64 --length 32 --sides ours
"""

import argparse
import functools
import importlib
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piper.models.decoder import Config

BEGUN = time.perf_counter()
PARTS = {  # of our side: what is timed, and as what; time inside another part counts there alone
    "build (fake)": ["piper.capture.trace.trace:build_fake"],
    "record": ["piper.capture.trace.trace:record"],
    "trace, cut": ["piper.capture.recordings:trace"],
    "joint": ["piper.capture.autodiff.differentiate:CodeCache._joint_of"],
    "partition": ["piper.capture.autodiff.partition:Partitioner.run"],
    "remat": ["piper.capture.autodiff.remat:Chooser.run"],
    "costs": ["piper.capture.autodiff.code:cost_of"],
    "differentiate": ["piper.capture.recordings:differentiate"],
    "lower": ["piper.compiler:lower"],
    "prove": ["piper.lower.emit:prove", "piper.lower.emit:prove_values", "piper.lower.lower:prove"],
    "probe optimizer": ["piper.compiler:probe_optimizer"],
    "build phases": ["piper.capture.autodiff.code:GraphCode.build"],
    "find layers": ["piper.capture.compile.phases:pieces_of"],
    "hash": ["piper.capture.compile.phases:name_of"],
    "send graphs": ["piper.capture.compile.servers:Compilation.__init__"],
    "wait for servers": ["piper.capture.compile.servers:Compilation.wait"],
    "Inductor": ["piper.capture.compile.inductor:standalone_compile"],
    "kernels": ["torch._inductor.async_compile:AsyncCompile.wait"],
    "load code": ["piper.capture.compile.inductor:_load"],
    "read cache": [
        "piper.capture.compile.cache:Cache.find",
        "piper.capture.compile.cache:Cache.restore",
    ],
    "write cache": [
        "piper.capture.compile.cache:Cache.keep",
        "piper.capture.compile.inductor:_made_files",
    ],
    "initial values": ["piper.runtime.setup:build_model"],
    "worker": ["piper.workers.inline:Worker"],
}


class Split:
    """Adds up the time of parts; a part that runs inside another counts only as itself."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.each: dict[str, list[float]] = {"Inductor": [], "load code": []}
        self.local = threading.local()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever is timed
            stack = self.local.__dict__.setdefault("stack", [0.0])
            stack.append(0.0)
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent = time.perf_counter() - begin
                inner = stack.pop()
                stack[-1] += spent
                if threading.current_thread() is not threading.main_thread():
                    name_here = f"{name} (aside)"
                else:
                    name_here = name
                self.seconds[name_here] += spent - inner
                self.calls[name_here] += 1
                if name in self.each:
                    self.each[name].append(spent)

        return run

    def install(self) -> None:
        """Time every part that this version has."""
        for name, places in PARTS.items():
            for place in places:
                module, _, path = place.partition(":")
                *outer, last = path.split(".")
                try:
                    holder: Any = importlib.import_module(module)
                    for step in outer:
                        holder = getattr(holder, step)
                    found = getattr(holder, last)
                except (ImportError, AttributeError):
                    continue
                setattr(holder, last, self.timed(name, found))


class Stages(logging.Handler):
    """Notes when each stage begins, as the package logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.seen = time.perf_counter(), dict[str, float]()

    def emit(self, record: logging.LogRecord) -> None:
        self.seen[self.format(record)] = time.perf_counter() - self.begun


class Sampler(threading.Thread):
    """Looks at the stacks of the main thread and of devices' threads, to say where their time goes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.inside: Counter[str] = Counter()
        self.itself: Counter[str] = Counter()
        self.going, self.looks = True, 0

    def run(self) -> None:
        while self.going:
            time.sleep(0.005)
            frames = sys._current_frames()
            self.looks += 1
            for thread in threading.enumerate():
                if thread is threading.main_thread() or thread.name.startswith("device"):
                    self.look(frames.get(thread.ident or 0))

    def look(self, frame: FrameType | None) -> None:
        """Count the functions of one stack."""
        names = list[str]()
        while frame is not None:
            code = frame.f_code
            names.append(f"{'/'.join(code.co_filename.split('/')[-3:])}:{code.co_name}")
            frame = frame.f_back
        self.inside.update(set(names))
        self.itself.update(names[:1])

    def shares(self, seconds: float, most: int) -> dict[str, list[float]]:
        """Return the functions that hold most of the time: seconds inside them, and in themselves."""
        unit = seconds / max(1, self.looks)
        most_inside = dict(self.inside.most_common(most)) | dict(self.itself.most_common(most // 4))
        return {name: [self.inside[name] * unit, round(self.itself[name] * unit, 2)] for name in most_inside}


def main_config(asked: argparse.Namespace) -> "Config":
    from gpu import DENSE

    if asked.dim == DENSE.dim:
        return replace(DENSE, layers=asked.layers)
    heads = 4
    return replace(
        DENSE, vocab=256, dim=asked.dim, layers=asked.layers, heads=heads, kv_heads=2,
        head_dim=asked.dim // heads, hidden=3 * asked.dim,
    )  # fmt: skip


def ours(asked: argparse.Namespace) -> dict[str, Any]:
    """Run our first step, and split its time."""
    import torch
    import torch._inductor.compile_fx
    from gpu import batch_of, job_of

    import piper
    from piper.capture.compile import inductor, phases  # noqa: F401  imports count as imports
    from piper.workers import inline  # noqa: F401

    cuda = asked.device == "cuda"
    if cuda:
        torch.zeros(1, device="cuda")
    config, split = main_config(asked), Split()
    imports = time.perf_counter() - BEGUN
    split.install()
    batch = batch_of(config, 4, asked.length)
    job = replace(job_of(config, batch, []), initial="host" if asked.child == "host" else "device")
    stages = Stages()
    logging.getLogger("piper").addHandler(stages)
    logging.getLogger("piper").setLevel(logging.DEBUG)
    sampler = Sampler()
    if asked.sample:
        sampler.start()
    marks = [time.perf_counter()]
    program = piper.compile(job, device=asked.device, compile=True, cache=asked.cache)
    marks.append(time.perf_counter())
    with piper.launch(program, on="inline") as run:
        marks.append(time.perf_counter())
        run.step(batch)
        sampler.going = False
        marks.append(time.perf_counter())
        run.step(batch)
        marks.append(time.perf_counter())
        memory = torch.cuda.max_memory_allocated() if cuda else 0
    compiled, launched, first, second = (b - a for a, b in itertools.pairwise(marks))
    from torch._dynamo.utils import compilation_time_metrics

    inner = {name: sum(spans) for name, spans in compilation_time_metrics.items()}
    return {
        "total": marks[3] - marks[0],
        "imports": imports,
        "compile()": compiled,
        "launch()": launched,
        "step 1": first,
        "step 2": second,
        "GiB": memory / 2**30,
        "parts": {name: [spent, split.calls[name]] for name, spent in split.seconds.most_common()},
        "stages": stages.seen,
        "each": {name: " ".join(f"{one:.1f}" for one in spans) for name, spans in split.each.items()},
        "inside torch": dict(sorted(inner.items(), key=lambda each: -each[1])[:18]),
        "sampled": sampler.shares(marks[3] - marks[0], asked.sample),
    }


def peer(asked: argparse.Namespace) -> dict[str, Any]:
    """Run the peer's first step: `torch.compile` of forward and loss, values drawn on the device."""
    import torch
    import torch._inductor.compile_fx
    from gpu import batch_of, torch_step

    if asked.device == "cuda":
        torch.zeros(1, device="cuda")
    config = main_config(asked)
    batch = batch_of(config, 4, asked.length)
    imports = time.perf_counter() - BEGUN
    marks = [time.perf_counter()]
    step = torch_step(config, batch, 1)
    torch.cuda.synchronize()
    marks.append(time.perf_counter())
    for _ in range(2):
        step()
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
    built, first, second = (b - a for a, b in itertools.pairwise(marks))
    return {
        "total": marks[2] - marks[0],
        "imports": imports,
        "model": built,
        "step 1": first,
        "step 2": second,
        "GiB": torch.cuda.max_memory_allocated() / 2**30,
    }


def steps(asked: argparse.Namespace) -> dict[str, Any]:
    """Train all sides in turns: ours, ours with every phase compiled whole, and the peer."""
    from gpu import GIB, batch_of, built, job_of, piper_step, take_turns, torch_step

    from piper.capture.compile import phases

    config = main_config(asked)
    batch = batch_of(config, 4, asked.length)
    job = job_of(config, batch, [])
    with ExitStack() as stack:
        names = asked.turns.split(",")
        sides = []
        for name in names:
            if name == "torch.compile":
                sides.append(built(name, lambda: torch_step(config, batch, 1)))
                continue
            worth, phases.WORTH = phases.WORTH, 10**9 if name == "whole" else phases.WORTH
            graphs = name == "graphs"
            sides.append(built(name, lambda: piper_step(stack, job, batch, asked.cache, graphs=graphs)))  # noqa: B023
            phases.WORTH = worth
        peaks = take_turns(sides, 4, 4)
        return {
            side.name: {"ms": side.median * 1e3, "GiB": peaks[side.name] / GIB, "first": side.build_s}
            for side in sides
        }


def draws(asked: argparse.Namespace) -> dict[str, Any]:
    """Draw initial values on the device, as our side and as plain torch does; both give the same numbers."""
    import torch
    from gpu import batch_of, job_of

    from piper.models import decoder
    from piper.runtime.setup import build_model

    config, there = main_config(asked), torch.device("cuda", 0)
    job = job_of(config, batch_of(config, 4, asked.length), [])
    torch.zeros(1, device=there)
    marks = [time.perf_counter()]

    def mark() -> None:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())

    ours = build_model(job, there)
    mark()
    torch.manual_seed(job.seed)
    with there:
        theirs = decoder.Decoder(config)
    mark()
    back = [parameter.data.to(there) for parameter in ours.parameters()]
    mark()
    same = all(torch.equal(a, b) for a, b in zip(back, theirs.parameters(), strict=True))
    own, plain, returned = (b - a for a, b in itertools.pairwise(marks))
    return {
        "drawn, copied to the host": own,
        "plain torch on the device": plain,
        "copied to the device": returned,
        "the same numbers": str(same),
    }


SIDES = {"ours": ours, "host": ours, "profile": ours, "peer": peer, "steps": steps, "draws": draws}
CACHES = {"profile": "ours", "host": "ours", "steps": "peer"}  # sides that use torch's cache of another


def child(side: str, asked: argparse.Namespace, cache: str, limit: float) -> dict[str, Any]:
    """Measure a side in a process of its own."""
    command = [sys.executable, __file__, "--child", side, "--cache", cache]
    for name in ("device", "dim", "layers", "length", "turns"):
        command += [f"--{name}", str(getattr(asked, name))]
    if side == "profile":
        command += ["--sample", "250"]
    inductor = os.path.join(os.path.dirname(cache), "torch", CACHES.get(side, side))
    own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": inductor}
    begin = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=own, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {limit:.0f} s"}
    if done.returncode:
        return {"failed": done.stderr.strip()[-1500:]}
    return {**json.loads(done.stdout.splitlines()[-1]), "process": time.perf_counter() - begin}


def text_of(what: str, found: dict[str, Any]) -> str:
    """Return the figures of one process as lines."""
    lines = [what]
    for key, value in found.items():
        if not isinstance(value, dict):
            lines.append(f"  {key:<18} {value:8.2f}" if isinstance(value, float) else f"  {key}: {value}")
            continue
        lines.append(f"  {key}:")
        for name, held in value.items():
            if isinstance(held, dict):
                lines.append(f"    {name:<32} " + ", ".join(f"{k} {v:.2f}" for k, v in held.items()))
            elif isinstance(held, list):
                lines.append(f"    {name:<32} {held[0]:8.2f}  ({held[1]})")
            elif isinstance(held, str):
                lines.append(f"    {name:<32} {held}")
            else:
                lines.append(f"    {name:<32} {held:8.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--sample", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--turns", default="torch.compile,ours")
    parser.add_argument("--sides", default="ours peer steps", help="which, in order; ours:cold for one alone")
    parser.add_argument("--budget", type=float, default=235, help="seconds in all")
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(SIDES[asked.child](asked)))
        return
    until = time.perf_counter() + asked.budget
    with tempfile.TemporaryDirectory(prefix="piper-first-step-") as folder:
        for side in asked.sides.split():
            side, _, heats = side.partition(":")
            heats = heats or {"steps": "in turns", "profile": "warm", "draws": "alone"}.get(side, "cold,warm")
            for heat in heats.split(","):
                cache = os.path.join(folder, "ours")
                os.makedirs(cache, exist_ok=True)
                left = until - time.perf_counter()
                found = child(side, asked, cache, left) if left > 10 else {"failed": "no time left"}
                text = text_of(f"{side}, {heat}", found)
                print(text, flush=True)
                if asked.out:
                    with Path(asked.out).open("a", encoding="utf-8") as file:
                        file.write(text + "\n")


if __name__ == "__main__":
    main()
