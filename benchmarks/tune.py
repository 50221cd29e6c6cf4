"""What `piper tune` finds, and how fast: Llama-8B on 64 H100, a mixture of experts on 64, 70B on 512.

    python benchmarks/tune.py                 every case
    python benchmarks/tune.py llama8b-fixed   one of them

Each case prints the best strategy, what was traced and compiled, the seconds of wall time, the CPU time of
all processes, and that of one candidate: its compilation, proof and simulation, with all traces at hand. The
case `llama8b-fixed` holds PP8 x DP8 x 16 microbatches, zero=1 and 42 GiB fixed, and compares the tuned
schedule and boundaries with the best named schedule over even stages: with boundaries between layers, and
with boundaries between attention and feed-forward too.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch import nn

import piper
from piper.ir.format import seconds, size
from piper.models import moe
from piper.process.gc_pause import no_collection
from piper.tuning.choice import Recompute
from piper.tuning.evaluate import evaluate
from piper.tuning.result import Tuned
from piper.tuning.space import NAMED, Space, grid_of
from piper.tuning.strategy_search import StrategySearch
from piper.tuning.tune import tune

GIB = 2**30
REPEATED = 12  # candidates of a search, about so many, are evaluated once more for their time
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


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those it waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def searched(name: str, case: Case, space: Space | None = None) -> Tuned:
    """Search, and print what is found and how long it takes."""
    searches: list[StrategySearch] = []
    started = cpu_seconds()
    found = tune(
        case.job(),
        "h100",
        case.devices,
        memory=case.memory,
        space=space,
        progress=lambda search, _: searches.append(search),
    )
    show(name, found, cpu_seconds() - started, again(searches[-1]))
    return found


def again(search: StrategySearch) -> float:
    """Evaluate candidates once more, all recorded now, and return the median CPU time of one.

    As in the search, no garbage is collected meanwhile.
    """
    spent, known = [], list(search.evaluated)
    with no_collection():
        for choice, grid in known[:: max(1, len(known) // REPEATED)]:
            started = cpu_seconds()
            evaluate(search.model, choice, grid or grid_of(choice))
            spent.append(cpu_seconds() - started)
    return median(spent)


def show(name: str, found: Tuned, cpu: float, each: float) -> None:
    """Print what a search found."""
    print(f"{name}: {seconds(found.best.step)} a step, {size(found.best.peak)} of {size(found.limit)}")
    print(f"  {found.best.choice.label}")
    print(
        f"  {len(found.evaluated)} compiled, {len(found.discarded)} discarded, "
        f"{'complete' if found.complete else 'not complete'}; sizes traced: {found.recorded}"
    )
    print(
        f"  {found.seconds:.1f} s of wall time (at most {LIMITS['seconds']:.0f}), {cpu:.1f} s of CPU; "
        f"{each:.2f} s of CPU for a candidate (at most {LIMITS['each']})",
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
        even = replace(whole, schedules=NAMED, boundaries=("even",))
        named = searched(f"{kind}, named and even", here, even)
        tuned = searched(f"{kind}, tuned", here, whole)
        best = min(best, named.best.step)
        print(f"  bound of its schedule and boundaries: {seconds(tuned.best.bound)}")
        print(f"  shorter by {1 - tuned.best.step / best:.1%} (at least {LIMITS['shorter']:.0%})", flush=True)


def main(names: list[str]) -> None:
    for name in names or CASES:
        if name == "llama8b-fixed":
            fixed()
        else:
            searched(name, CASES[name])


if __name__ == "__main__":
    main(sys.argv[1:])
