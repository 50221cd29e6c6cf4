"""How long compiling takes: a Hugging Face model of 8B shape, and synthetic chains up to 16,384 devices.

Each case runs in a process of its own, so that its peak memory is its own. `all CPU` is that process's CPU
time, imports included: where it is well under the time, the machine had other work.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where `tests` is found

CHAINS = {  # name: stages, replicas, microbatches
    "chain PP=16 x DP=64, 64 microbatches": (16, 64, 64),
    "chain PP=64 x DP=256, 128 microbatches": (64, 256, 128),
    "chain PP=64 x DP=256, 256 microbatches": (64, 256, 256),
}
LIMITS = {"chain PP=16 x DP=64, 64 microbatches": 10, "chain PP=64 x DP=256, 256 microbatches": 30}
QWEN = "Qwen3-8B shape, seq 4096, PP=4 x DP=8 zero=3"
QWEN_LIMIT = 25
TENSOR = "Llama-8B shape, 36 layers, TP=8 x PP=4 x DP=8"
TENSOR_LIMIT = 30


def compile_chain(stages: int, replicas: int, microbatches: int, zero: int) -> dict[str, float]:
    """Directives, lowering and proof of a chain under 1F1B."""
    from piper import at, replicate, schedules, split
    from piper.directives import apply
    from piper.ir.graph import start
    from piper.lower.lower import lower
    from piper.lower.validate import validate
    from tests.chain import chain

    begin = time.perf_counter()
    strategy = [
        replicate(at(PP=s), range(s * replicas, (s + 1) * replicas), zero=zero) for s in range(stages)
    ]
    strategy += [split(at(), parts=microbatches), *schedules.one_f_one_b(stages, microbatches)]
    graph = apply(start(chain(stages)), strategy)
    directed = time.perf_counter()
    plans, _ = lower(validate(graph))
    end = time.perf_counter()
    return {
        "directives": directed - begin,
        "lowering and proof": end - directed,
        "total": end - begin,
        "instructions": sum(len(plan.instrs) for plan in plans),
    }


def compile_qwen() -> dict[str, float]:
    """An unmodified Hugging Face model, never allocated, to a proven plan."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import piper

    config = Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    stages, replicas, microbatches = 4, 8, 8

    def model() -> torch.nn.Module:
        per = config.num_hidden_layers // stages
        regions = [[f"model.layers.{i}" for i in range(s * per, (s + 1) * per)] for s in range(stages)]
        return piper.annotate_modules(Qwen3ForCausalLM(config), {"PP": regions})

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=batch["tokens"], use_cache=False).logits
        return piper.losses.cross_entropy(logits, batch["labels"])

    def data() -> list[dict[str, torch.Tensor]]:
        tokens = torch.zeros(replicas * microbatches, 4096, dtype=torch.long)
        return [{"tokens": tokens, "labels": tokens}]

    strategy = [
        piper.replicate(piper.at(PP=s), range(s * replicas, (s + 1) * replicas), zero=3)
        for s in range(stages)
    ]
    strategy += [
        piper.split(piper.at(), parts=microbatches),
        *piper.schedules.one_f_one_b(stages, microbatches),
    ]
    job = piper.Job(model=model, loss=loss, data=data, strategy=strategy, precision="bf16")
    begin = time.perf_counter()
    program = piper.compile(job)
    return {
        "total": time.perf_counter() - begin,
        "instructions": sum(len(plan.instrs) for plan in program.plans),
    }


def compile_tensor() -> dict[str, float]:
    """The same kind of model under tensor and sequence parallelism, a pipeline and data parallelism."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import piper

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14_336, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128_256,
    )  # fmt: skip
    tokens = torch.zeros(128, 2048, dtype=torch.long)
    strategy = piper.strategies.tensor(
        layers=36, tp=8, dp=8, pp=4, zero=1, microbatches=16, weights=piper.tensor_plan(config)
    )
    job = piper.Job(
        model=lambda: piper.annotate_layers(LlamaForCausalLM(config)),
        loss=piper.losses.huggingface,
        data=lambda: [{"input_ids": tokens, "labels": tokens}],
        strategy=strategy,
        precision="bf16",
    )
    begin = time.perf_counter()
    program = piper.compile(job)
    return {
        "total": time.perf_counter() - begin,
        "instructions": sum(len(plan.instrs) for plan in program.plans),
    }


def run_case(case: list[str]) -> dict[str, float]:
    """Run one case in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--case", *case], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(name: str, result: dict[str, float], limit: int | None) -> None:
    """Print one case."""
    bar = f"at most {limit} s" if limit else ""
    times = f"{result['total']:7.2f} s  {result['cpu']:7.2f} s"
    figures = f"{times}  {result['rss_gib']:5.2f} GiB  {result['instructions']:8.0f}"
    print(f"{name:45} {figures}  {bar}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="+", help="internal: run one case here and print JSON")
    parser.add_argument("--skip-model", action="store_true", help="only the synthetic chains")
    options = parser.parse_args()
    if options.case:
        models = {"qwen": compile_qwen, "tensor": compile_tensor}
        known = models.get(options.case[0])
        result = known() if known else compile_chain(*map(int, options.case))
        used = resource.getrusage(resource.RUSAGE_SELF)
        result["rss_gib"], result["cpu"] = used.ru_maxrss / 2**20, used.ru_utime + used.ru_stime
        print(json.dumps(result))
        return
    print(f"{'case':45} {'time':>9}  {'all CPU':>9}  {'memory':>9}  {'instrs':>8}  bar")
    totals: dict[str, float] = {}
    for zero in (0, 3):
        for name, sizes in CHAINS.items():
            result = run_case([*map(str, sizes), str(zero)])
            totals[f"{name} {zero}"] = result["total"]
            row(f"{name}, zero={zero}", result, LIMITS.get(name))
        double, single = (f"chain PP=64 x DP=256, {m} microbatches {zero}" for m in (256, 128))
        print(f"doubling microbatches, zero={zero}: {totals[double] / totals[single]:.2f}x (at most 2.3x)")
    if not options.skip_model:
        row(QWEN, run_case(["qwen"]), QWEN_LIMIT)
        row(TENSOR, run_case(["tensor"]), TENSOR_LIMIT)


if __name__ == "__main__":
    main()
