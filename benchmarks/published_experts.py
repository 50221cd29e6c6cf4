"""Published runs of mixtures of experts: the jobs `published` of recipes/gallery/, simulated.

python benchmarks/published_experts.py [ROW ...]

It writes tokens per second and device beside the published ones, a row for each run, to
benchmarks/results/published_experts.json; rows that are not named stay. `python docs/published.py --page`
writes them into docs/published.md.

The models are those of transformers, unmodified, with all their layers, as Inductor fuses them. A pipeline
repeats itself once it is full, so the step with the most microbatches is extrapolated from two shorter ones.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import piper
from piper.recipe import import_file
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import simulate

HERE = Path(__file__).parent
GALLERY = HERE.parent / "recipes" / "gallery"
RESULTS = HERE / "results" / "published_experts.json"
ARCHIVE = "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary-archive.html"
BRIDGE = f"[Megatron-Bridge 26.04.01]({ARCHIVE})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run: a recipe of the gallery with a job `published`, and what its source measured."""

    name: str
    recipe: str
    cluster: str
    microbatches: int  # of a step
    lengths: tuple[int, ...]  # microbatches of the steps that are simulated: all, or two numbers
    published: float  # tokens per second and device
    source: str


RUNS = (
    Run(
        name="DeepSeek-V3, 2,048 H800",
        recipe="deepseek_v3",
        cluster=str(HERE / "h800.toml"),
        microbatches=120,
        lengths=(120,),
        published=1e12 / (180_000 * 3600),  # 180,000 hours of a device for 10^12 tokens
        source="[2412.19437](https://arxiv.org/abs/2412.19437), section 1",
    ),
    Run(
        name="Qwen3-MoE 235B-A22B, 256 H100",
        recipe="qwen3_moe",
        cluster="h100",
        microbatches=512,
        lengths=(16, 24),
        published=1712,
        source=BRIDGE,
    ),
    Run(
        name="GPT-OSS 120B, 64 H100",
        recipe="gpt_oss",
        cluster="h100",
        microbatches=80,
        lengths=(80,),
        published=5824,
        source=BRIDGE,
    ),
)


def simulated(run: Run, microbatches: int) -> tuple[float, int, int, int]:
    """Simulate a step. Return its seconds and tokens, the devices, and the bytes of the fullest one."""
    job = import_file(GALLERY / f"{run.recipe}.py").published(microbatches)
    program = piper.compile(job, device="cpu", compile=True)
    found = simulate(program.plans, program.outline, Roofline(load_cluster(run.cluster)))
    (batch,) = job.data()
    peak = max(memory.peak for memory in found.memories)
    return found.step, batch["input_ids"].numel(), len(program.plans.devices), peak


def predicted(run: Run) -> dict[str, object]:
    """Simulate a run. Return its row."""
    begin = time.process_time()
    steps = {count: simulated(run, count) for count in run.lengths}
    most = max(run.lengths)
    step, tokens, devices, peak = steps[most]
    if most < run.microbatches:
        few = min(run.lengths)
        step += (run.microbatches - most) / (most - few) * (step - steps[few][0])
        tokens = tokens // most * run.microbatches
    rate = tokens / step / devices
    return {
        "run": run.name,
        "published": round(run.published),
        "predicted": round(rate),
        "ratio": round(rate / run.published, 2),
        "step_s": round(step, 2),
        "microbatches": run.microbatches,
        "simulated": list(run.lengths),
        "peak_gib": round(peak / 2**30),
        "cpu_s": round(time.process_time() - begin),
        "source": run.source,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="recipes, such as gpt_oss; default: all")
    wanted = parser.parse_args().rows or [run.recipe for run in RUNS]
    sys.path.insert(0, str(GALLERY))  # the module that recipes share
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for run in RUNS:
        if run.recipe in wanted:
            rows[run.recipe] = predicted(run)
            print(json.dumps(rows[run.recipe]), flush=True)
            ordered = {one.recipe: rows[one.recipe] for one in RUNS if one.recipe in rows}
            RESULTS.write_text(json.dumps(ordered, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
