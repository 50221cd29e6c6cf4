"""Published runs of mixtures of experts: the jobs `published` of recipes/gallery/, simulated.

python benchmarks/published_experts.py [ROW ...]

It writes tokens per second and device beside the published ones, a row for each run, to
benchmarks/results/published_experts.json; rows that are not named stay. `python docs/published.py --page`
writes them into docs/published.md.

The models are those of transformers, unmodified, with all their layers, as Inductor fuses them. A pipeline
repeats itself once it is full, so the step with the most microbatches is extrapolated from two shorter ones.

Without a GPU, torch has no fused attention whose values are narrower than its keys, as those of DeepSeek-V3
are, and writes the scores to memory. So they are padded, as transformers does for FlashAttention.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lowering import lowered
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import piper
from piper.directives import apply
from piper.ir.graph import start
from piper.recipe import import_file
from piper.simulate.cluster import load_cluster
from piper.simulate.costs import Roofline
from piper.simulate.simulate import simulate

HERE = Path(__file__).parent
GALLERY = HERE.parent / "recipes" / "gallery"
RESULTS = HERE / "results" / "published_experts.json"
ARCHIVE = "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary-archive.html"
PADDED = "padded"
BRIDGE = f"[Megatron-Bridge 26.04.01]({ARCHIVE})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run: a recipe of the gallery with a job `published`, and what its source measured."""

    name: str
    recipe: str
    cluster: str
    microbatches: int  # of a step
    proven: int  # microbatches of the step that is compiled
    lengths: tuple[int, ...]  # microbatches of the steps that are simulated: all, or two numbers
    published: float  # tokens per second and device
    source: str
    options: Mapping[str, object] = field(default_factory=dict)  # of its job


RUNS = (
    Run(
        name="DeepSeek-V3, 2,048 H800",
        recipe="deepseek_v3",
        cluster=str(HERE / "h800.toml"),
        microbatches=120,
        proven=32,
        lengths=(120,),
        published=1e12 / (180_000 * 3600),  # 180,000 hours of a device for 10^12 tokens
        source="[2412.19437](https://arxiv.org/abs/2412.19437), section 1",
        options={"attention": PADDED},
    ),
    Run(
        name="Qwen3-MoE 235B-A22B, 256 H100",
        recipe="qwen3_moe",
        cluster="h100",
        microbatches=512,
        proven=8,
        lengths=(16, 24),
        published=1712,
        source=BRIDGE,
    ),
    Run(
        name="GPT-OSS 120B, 64 H100",
        recipe="gpt_oss",
        cluster="h100",
        microbatches=80,
        proven=4,
        lengths=(80,),
        published=5824,
        source=BRIDGE,
    ),
)


def padded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """Attend with values as wide as keys: what is added is zero, and cut off again."""
    wide = nn.functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
    found, _ = sdpa_attention_forward(module, query, key, wide, mask, **options)
    return found[..., : value.shape[-1]], None


def predicted(run: Run) -> dict[str, object]:
    """Compile and prove the shortest step, and simulate the others from its captured model."""
    begin = time.process_time()
    published = partial(import_file(GALLERY / f"{run.recipe}.py").published, **run.options)
    program = piper.compile(published(run.proven), device="cpu", compile=True)
    devices, costs = len(program.plans.devices), Roofline(load_cluster(run.cluster))
    steps, rates, peaks = {}, {}, {}
    for count in run.lengths:
        job = published(count)
        (batch,) = job.data()
        plans = lowered(apply(start(program.outline), job.strategy), len(batch["input_ids"]))
        found = simulate(plans, program.outline, costs)
        steps[count], rates[count] = found.step, batch["input_ids"].numel() / count
        peaks[count] = max(memory.peak for memory in found.memories)
        print(f"{run.name}: {count} microbatches in {found.step:.3f} s", flush=True)
    most, few = max(run.lengths), min(run.lengths)
    step = steps[most]
    if most < run.microbatches:
        step += (run.microbatches - most) / (most - few) * (step - steps[few])
    rate = rates[most] * run.microbatches / step / devices
    return {
        "run": run.name,
        "published": round(run.published),
        "predicted": round(rate),
        "ratio": round(rate / run.published, 2),
        "step_s": round(step, 2),
        "microbatches": run.microbatches,
        "simulated": list(run.lengths),
        "peak_gib": round(peaks[most] / 2**30),
        "cpu_s": round(time.process_time() - begin),
        "source": run.source,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help="recipes, such as gpt_oss; default: all")
    wanted = parser.parse_args().rows or [run.recipe for run in RUNS]
    AttentionInterface.register(PADDED, padded)
    AttentionMaskInterface.register(PADDED, sdpa_mask)
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
