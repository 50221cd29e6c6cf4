"""131,072 devices on paper: a composed job planned, proven and simulated, and its goodput with failures.

python benchmarks/scale_131072.py [proof] [strategies] [devices] [failures]

The model has the widths of DeepSeek-V3 with grouped-query attention, 64 layers and 256 experts. Its job has
expert, tensor, sequence, context, pipeline and data parallelism, ZeRO-1, and copies of the state on a second
machine. Two layers are captured and repeated: equal layers run the same code. `proof` plans, proves and
simulates that job; the other parts compare other degrees, other numbers of devices, and what failures cost,
without the proof. Each row runs in a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

LAYERS, DIM, EXPERTS, TOP, HIDDEN, VOCAB = 64, 7168, 256, 8, 2048, 129_280
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128
SEQ = 32_768
BATCH = 4096  # sequences of a step: 134 million tokens
MACHINE = 8  # devices
CLUSTER = "h100"
SECONDS, GIB = 60, 8  # at most, to plan, prove and simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """How the job is cut: the devices of each kind of group, and the samples of a step."""

    tp: int
    cp: int
    ep: int
    pp: int
    devices: int = 131_072
    batch: int = BATCH
    protected: bool = True

    @property
    def dp(self) -> int:
        """Return how many pipelines there are."""
        return self.devices // (self.tp * self.cp * self.pp)

    @property
    def microbatches(self) -> int:
        return self.batch // self.dp

    @property
    def name(self) -> str:
        return f"TP{self.tp} CP{self.cp} EP{self.ep} PP{self.pp} DP{self.dp}"


COMPOSED = Degrees(tp=2, cp=8, ep=64, pp=8)  # the job that is proven: every kind of parallelism
STRATEGIES = (
    COMPOSED,
    Degrees(tp=1, cp=16, ep=64, pp=8),
    Degrees(tp=1, cp=32, ep=64, pp=8),
    Degrees(tp=1, cp=32, ep=256, pp=2),
    Degrees(tp=1, cp=32, ep=256, pp=4),
)
BEST = STRATEGIES[3]
DEVICES = (65_536, 131_072, 262_144)

# [Note: failures] What the goodput rests on; docs/scale.md says where each figure comes from.
MINUTES = 54 * 24 * 60 / 419 * 16_384  # of one device between interruptions
STORAGE = 2e12  # bytes per second that a cluster's storage takes
NOTICED = 10.0  # seconds until a lost machine is named
RESTART = 60.0  # seconds until all workers are forked and joined again
FAILURES = 20_000  # that are drawn


def captured(degrees: Degrees) -> "CapturedModel":  # noqa: F821
    """Capture two layers for one group of devices, and repeat the second."""
    import torch
    from repeated import repeated

    import piper
    from piper.models import moe
    from piper.models.layers import rope

    config = moe.Config(
        vocab=VOCAB, dim=DIM, layers=2, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        experts=EXPERTS, top_k=TOP, hidden=HIDDEN,
    )  # fmt: skip

    class Decoder(torch.nn.Module):
        """Tokens to logits: the embedding, each layer and the head are regions LAYER."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCAB, DIM)
            self.layers = torch.nn.ModuleList(moe.block(config) for _ in range(2))
            self.norm, self.head = torch.nn.RMSNorm(DIM), torch.nn.Linear(DIM, VOCAB, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with piper.annotate("LAYER"):
                x = self.embedding(tokens)
            for layer in self.layers:
                with piper.annotate("LAYER"):
                    x = layer(x, rope(tokens.shape[1], HEAD_DIM, config.rope_base, like=x))
            with piper.annotate("LAYER"):
                logits: torch.Tensor = self.head(self.norm(x))
            return logits

    def loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return piper.losses.cross_entropy(model(batch["tokens"]), batch["labels"])

    # As many sequences as a group of experts has pipelines, so that its exchanges are those of the job.
    group = degrees.tp * degrees.cp
    pipelines = max(1, degrees.ep // degrees.cp)
    tokens = torch.zeros(1, SEQ, dtype=torch.long).expand(pipelines, SEQ)
    devices = range(group * pipelines)
    job = piper.Job(
        model=Decoder,
        loss=loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        strategy=[piper.replicate(piper.at(), devices, zero=1), *shards(degrees, piper.at(), devices)],
        optimizer=lambda params: torch.optim.AdamW(params, fused=True),
        precision="bf16",
    )
    return repeated(piper.compile(job, device="cpu", compile=True).outline, LAYERS)


def shards(degrees: Degrees, where: "At", devices: range) -> list["Directive"]:  # noqa: F821
    """Return tensor, sequence, context and expert parallelism of some layers on their devices."""
    import piper

    weights = {"*attention.q|*attention.k|*attention.v|embedding|head": 0, "*attention.out": 1}
    fields = {"tokens": 1, "labels": 1}
    found: list[piper.Directive] = []
    if degrees.tp > 1:
        found.append(piper.shard(where, devices, ways=degrees.tp, axis="TP", weights=weights, between=1))
    if degrees.cp > 1:
        found.append(piper.shard(where, devices, ways=degrees.cp, axis="CP", batch=fields, balance="zigzag"))
    experts = piper.at(None, **{**dict(where.tags), "EP": "*"})
    return [*found, piper.shard(experts, devices, ways=degrees.ep)]


def strategy_of(degrees: Degrees) -> list["Directive"]:  # noqa: F821
    """Return the job's strategy: stages of equal cost, replicas with ZeRO-1, 1F1B, copies of the state."""
    import piper
    from piper.schedules.grid import grid_for, orders

    each, width = LAYERS // degrees.pp, degrees.devices // degrees.pp
    stages = [range(1 + each * stage, 1 + each * (stage + 1)) for stage in range(degrees.pp)]
    stages[0] = range(stages[0].stop)
    stages[-1] = range(stages[-1].start, LAYERS + 2)
    found: list[piper.Directive] = []
    for stage, layers in enumerate(stages):
        where, devices = piper.at(LAYER=layers), range(stage * width, (stage + 1) * width)
        found += [piper.replicate(where, devices, zero=1), *shards(degrees, where, devices)]
    if degrees.microbatches > 1:
        found.append(piper.split(piper.at(), parts=degrees.microbatches))
    if degrees.pp > 1 and degrees.microbatches > 1:
        grid = grid_for("1f1b", degrees.pp, degrees.microbatches)
        found += orders(grid, stage=[piper.at(LAYER=layers) for layers in stages])
    if degrees.protected:
        found.append(piper.protect(piper.at(), copies=1, devices_per_machine=MACHINE))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A job that was planned and simulated."""

    degrees: Degrees
    step: float  # seconds
    bubble: float  # of all devices' time: nothing computes
    exposed: float  # of it: communication that computing does not hide
    peak: float  # GiB of the fullest device
    host: float  # GiB of the fullest machine's host, for two versions of the state
    state: float  # TB of parameters and optimizer state, once
    instructions: int
    programs: int
    capture: float  # CPU seconds of this machine
    plan: float  # with the proof where it was asked for
    simulate: float
    memory: float  # GiB of this process at most

    @property
    def cpu(self) -> float:
        return self.capture + self.plan + self.simulate

    @property
    def utilisation(self) -> float:
        """Return the model's arithmetic over the peak of all devices."""
        return self.degrees.batch * SEQ * work_of_token() / self.step / self.degrees.devices / PEAK


PEAK = 989e12


def work_of_token() -> float:
    """Return the floating-point operations of a token: six for each parameter it meets, causal attention."""
    attention = DIM * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    layer = attention + DIM * EXPERTS + TOP * 3 * DIM * HIDDEN
    return 6 * (LAYERS * layer + VOCAB * DIM) + 6 * LAYERS * HEADS * HEAD_DIM * SEQ


def planned(degrees: Degrees, *, proof: bool) -> Planned:
    """Plan a job, prove it where asked, and simulate a step."""
    from lowering import lowered

    from piper.directives import apply
    from piper.ir.graph import start
    from piper.plan.protected import survival
    from piper.simulate.cluster import load_cluster
    from piper.simulate.costs import Roofline
    from piper.simulate.simulate import simulate

    times = [time.process_time()]
    outline = captured(degrees)
    times.append(time.process_time())
    plans = lowered(apply(start(outline), strategy_of(degrees)), degrees.batch, prove=proof)
    times.append(time.process_time())
    step = simulate(plans, outline, Roofline(load_cluster(CLUSTER)))
    times.append(time.process_time())
    survives = survival(plans)
    busy, exposed, _ = step.mean
    return Planned(
        degrees=degrees,
        step=step.step,
        bubble=1 - busy / step.step,
        exposed=exposed / step.step,
        peak=max(memory.peak for memory in step.memories) / 2**30,
        host=max(survives.host_bytes) / 2**30 if survives else 0.0,
        state=sum(survives.host_bytes) / 4e12 if survives else 0.0,
        instructions=sum(len(plan.instrs) for plan in plans),
        programs=len(plans),
        capture=times[1] - times[0],
        plan=times[2] - times[1],
        simulate=times[3] - times[2],
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )


def goodput(
    step: float, every: int, pause: float, recovery: float, between: float, *, again: int = 0
) -> float:
    """Return the share of time that goes into steps that count, with failures at random.

    every: steps from one version of the state to the next, each of which stops the job for `pause` seconds.
    again: steps that are repeated beyond those since the last version. recovery: seconds from a failure to
    the next step; a failure meanwhile begins it again. between: mean seconds between failures.
    """
    draw = random.Random(0)
    whole = useful = 0.0
    cycle = every * step + pause
    for _ in range(FAILURES):
        left = draw.expovariate(1 / between)
        whole += left
        left -= recovery
        if left > 0:
            kept = int(left // cycle) * every - again
            useful += max(0, kept) * step
    return useful / whole


def goodputs(found: Planned, bare: float) -> list[dict[str, object]]:
    """Return the goodput of a job with copies in memory, and with checkpoints in storage alone.

    bare: seconds of a step without copies.
    """
    devices = found.degrees.devices
    between = MINUTES / devices * 60
    written = found.state * 1e12 / STORAGE
    best = max(1, round((2 * written * between) ** 0.5 / bare))  # Young's interval
    rows: list[tuple[str, str, float]] = []
    for restart in (RESTART, 5 * RESTART):
        recovery = NOTICED + restart
        kept = goodput(found.step, 1, 0.0, recovery, between, again=1) * bare / found.step
        saved = goodput(bare, best, written, recovery + written, between)
        rows.append((f"copies in memory, every step, restart in {restart:.0f} s", "1", kept))
        rows.append((f"storage alone, restart in {restart:.0f} s", str(best), saved))
    return [
        {
            "state": name,
            "every steps": every,
            "failures every": f"{between / 60:.1f} min",
            "copies make a step longer by": f"{100 * (found.step / bare - 1):.2f} %",
            "goodput %": f"{100 * share:.1f}",
        }
        for name, every, share in rows
    ]


@cache  # several parts show the same job
def run_case(degrees: Degrees, *, proof: bool) -> Planned:
    """Plan a job in a fresh process."""
    asked = json.dumps({"degrees": asdict(degrees), "proof": proof})
    done = subprocess.run(
        [sys.executable, __file__, "--case", asked], capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return Planned(**{**found, "degrees": Degrees(**found["degrees"])})


def row_of(found: Planned) -> dict[str, object]:
    """Return the columns of a job."""
    return {
        "strategy": found.degrees.name,
        "devices": found.degrees.devices,
        "microbatches": found.degrees.microbatches,
        "step s": f"{found.step:.2f}",
        "of peak %": f"{100 * found.utilisation:.1f}",
        "idle %": f"{100 * (found.bubble - found.exposed):.0f}",
        "exposed %": f"{100 * found.exposed:.0f}",
        "GiB": f"{found.peak:.0f}",
    }


def table(rows: list[dict[str, object]]) -> str:
    """Write rows as a table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row.values())) + " |" for row in rows)])


def proven() -> str:
    """Plan, prove and simulate the composed job, and compare it with the same without copies."""
    found = run_case(COMPOSED, proof=True)
    measures = {
        "capture of two layers": f"{found.capture:.1f} s",
        "directives, lowering and proof": f"{found.plan:.1f} s",
        "simulation": f"{found.simulate:.1f} s",
        "together": f"{found.cpu:.1f} s (at most {SECONDS} s)",
        "memory": f"{found.memory:.2f} GiB (at most {GIB} GiB)",
        "programs": str(found.programs),
        "instructions": str(found.instructions),
        "state": f"{found.state:.1f} TB",
        "host memory of a machine": f"{found.host:.0f} GiB",
    }
    rows: list[dict[str, object]] = [{"what": what, "value": value} for what, value in measures.items()]
    return f"{table([row_of(found)])}\n\n## cost\n\n{table(rows)}"


def failing() -> str:
    """Return the goodput of the best strategy."""
    bare = run_case(replace(BEST, protected=False), proof=False)
    return table(goodputs(run_case(BEST, proof=False), bare.step))


PARTS = {
    "proof": proven,
    "strategies": lambda: table([row_of(run_case(one, proof=False)) for one in STRATEGIES]),
    "devices": lambda: table([row_of(run_case(replace(BEST, devices=n), proof=False)) for n in DEVICES]),
    "failures": failing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="internal: plan one job here and print JSON")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    options = parser.parse_args()
    if options.case:
        asked = json.loads(options.case)
        print(json.dumps(asdict(planned(Degrees(**asked["degrees"]), proof=asked["proof"]))))
        return
    for name in options.parts or PARTS:
        print(f"## {name}\n\n{PARTS[name]()}\n", flush=True)


if __name__ == "__main__":
    main()
