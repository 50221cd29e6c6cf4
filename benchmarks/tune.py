"""What `piper tune` finds, and how fast: Llama-8B on 64 H100, a mixture of experts on 64, 70B on 512.

    python benchmarks/tune.py                 every case
    python benchmarks/tune.py llama8b-fixed   one of them

Each case prints the best strategy, what was traced and compiled, and the seconds of wall and CPU time. The
case `llama8b-fixed` holds PP8 x DP8 x 16 microbatches, zero=1 and 42 GiB fixed, and compares the tuned
schedule and boundaries with the best named schedule over even stages: with boundaries between layers, and
with boundaries between attention and feed-forward too.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

import piper
from piper.format import seconds, size
from piper.models import moe
from piper.tuning.choice import Recompute
from piper.tuning.evaluate import Evaluation
from piper.tuning.result import Tuned
from piper.tuning.space import NAMED, Space
from piper.tuning.strategy_search import StrategySearch
from piper.tuning.tune import tune

GIB = 2**30
LIMITS = {"seconds": 60.0, "each": 0.3, "shorter": 0.15}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One search."""

    job: Callable[[], piper.Job]
    devices: int
    memory: int


def by_layer(model: nn.Module) -> nn.Module:
    return piper.annotate_layers(model)


def by_half_layer(model: nn.Module) -> nn.Module:
    """Attention and feed-forward are regions of their own, so a stage may begin with either."""
    halves = [
        path
        for number in range(len(model.model.layers))  # type: ignore[arg-type, union-attr]
        for path in (f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp")
    ]
    return piper.annotate_modules(model, {"LAYER": halves})


def llama(
    layers: int,
    dim: int,
    hidden: int,
    heads: int,
    samples: int,
    length: int,
    annotate: Callable[[nn.Module], nn.Module] = by_layer,
) -> piper.Job:
    """A Llama of this shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        use_cache=False,
        tie_word_embeddings=False,
        max_position_embeddings=length,
    )
    tokens = torch.zeros(samples, length, dtype=torch.long)
    return piper.Job(
        model=lambda: annotate(LlamaForCausalLM(config)),
        loss=token_loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        precision="bf16",
    )


def token_loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["tokens"], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def mixture() -> piper.Job:
    """A mixture of experts of 24 layers: 64 experts, 8 for each token."""
    config = moe.Config(
        vocab=50304,
        dim=2048,
        layers=24,
        heads=16,
        kv_heads=16,
        head_dim=128,
        stages=24,
        experts=64,
        top_k=8,
        hidden=1024,
    )
    tokens = torch.zeros(256, 4096, dtype=torch.long)
    return piper.Job(
        model=lambda: moe.MoEDecoder(config),
        loss=moe.token_loss,
        data=lambda: [{"tokens": tokens, "labels": tokens}],
        precision="bf16",
    )


CASES = {
    "llama8b": Case(job=lambda: llama(32, 4096, 14336, 32, 128, 4096), devices=64, memory=74 * GIB),
    "llama8b-fixed": Case(job=lambda: llama(32, 4096, 14336, 32, 128, 4096), devices=64, memory=42 * GIB),
    "moe": Case(job=mixture, devices=64, memory=74 * GIB),
    "llama70b": Case(job=lambda: llama(80, 8192, 28672, 64, 512, 4096), devices=512, memory=74 * GIB),
}


@dataclass(slots=True)
class Watch:
    """Notes the CPU time of each candidate: of its compilation, proof and simulation, recordings apart."""

    spent: list[float]
    last: float
    sizes: int = 0

    def __call__(self, search: StrategySearch, found: Evaluation) -> None:
        now = time.process_time()
        if len(search.model.recorded) == self.sizes:
            self.spent.append(now - self.last)
        self.last, self.sizes = now, len(search.model.recorded)


def searched(case: Case, space: Space | None = None) -> tuple[Tuned, Watch]:
    """Search, and note how long it takes."""
    watch = Watch([], time.process_time())
    found = tune(
        case.job(),
        "h100",
        case.devices,
        memory=case.memory,
        space=space,
        progress=watch,
    )
    return found, watch


def show(name: str, found: Tuned, watch: Watch, cpu: float) -> None:
    """Print what a search found."""
    print(f"{name}: {seconds(found.best.step)} a step, {size(found.best.peak)} of {size(found.limit)}")
    print(f"  {found.best.choice.label}")
    print(
        f"  {len(found.evaluated)} compiled, {len(found.discarded)} discarded, "
        f"{'complete' if found.complete else 'not complete'}; sizes traced: {found.recorded}"
    )
    middle = sorted(watch.spent)[len(watch.spent) // 2] if watch.spent else 0.0
    print(
        f"  {found.seconds:.1f} s of wall time, {cpu:.1f} s of CPU (at most {LIMITS['seconds']:.0f}); "
        f"{middle:.2f} s of CPU for a candidate (at most {LIMITS['each']})",
        flush=True,
    )


def fixed() -> None:
    """Compare the tuned schedule and boundaries with the best named schedule over even stages."""
    case = CASES["llama8b-fixed"]
    common = {
        "ranks": (8,),
        "rows": (1,),
        "zeros": (1,),
        "mixed": False,
        "recompute": (Recompute(),),
        "neighbours": ("replicas",),
        "tensor": (1,),
        "context": (1,),
    }
    best = float("inf")
    for kind, annotate in (("layers", by_layer), ("half layers", by_half_layer)):
        job = partial(llama, 32, 4096, 14336, 32, 128, 4096, annotate)
        here, whole = replace(case, job=job), Space(**common)  # type: ignore[arg-type]
        started = time.process_time()
        even = replace(whole, schedules=NAMED, boundaries=("even",))
        named, watch = searched(here, even)
        show(f"{kind}, named and even", named, watch, time.process_time() - started)
        started = time.process_time()
        tuned, watch = searched(here, whole)
        show(f"{kind}, tuned", tuned, watch, time.process_time() - started)
        best = min(best, named.best.step)
        print(f"  bound of its schedule and boundaries: {seconds(tuned.best.bound)}")
        print(f"  shorter by {1 - tuned.best.step / best:.1%} (at least {LIMITS['shorter']:.0%})", flush=True)


def main(names: list[str]) -> None:
    for name in names or CASES:
        if name == "llama8b-fixed":
            fixed()
            continue
        started = time.process_time()
        found, watch = searched(CASES[name])
        show(name, found, watch, time.process_time() - started)


if __name__ == "__main__":
    main(sys.argv[1:])
