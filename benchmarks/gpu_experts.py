"""A small mixture of experts on one GPU: Piper, Piper with the step as one CUDA graph, and TorchTitan.

    pip install --target build/site --no-deps torchtitan==0.2.2 torchdata tyro docstring-parser typeguard
    PYTHONPATH=.:build/site python -m benchmarks.gpu_experts --rounds 2

All train the same decoder from the same weights on the same random batch, compiled: products in bf16; weights
and AdamW in float32. TorchTitan runs its own trainer with its own Qwen3-MoE. Each side is a process of its
own, and the sides take turns. Where TorchTitan is not installed, its line says so.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import piper
from benchmarks.ranks_rows import SEED, adamw
from benchmarks.ranks_sides import free_port
from benchmarks.ranks_titan import as_words, built_trainer, prepare_for
from benchmarks.ranks_titan_experts import as_titan_experts, qwen3
from piper.models import moe

SIDES = ("piper", "graphs", "torchtitan")
SIZES = {  # model, samples, tokens of each
    "small": (  # 0.99 billion parameters
        moe.Config(
            vocab=32_768,
            dim=1024,
            layers=12,
            heads=16,
            kv_heads=8,
            head_dim=64,
            experts=16,
            top_k=2,
            hidden=1536,
        ),
        2,
        1024,
    ),
    "tiny": (moe.Config.tiny(stages=1), 2, 16),
}


def batch_of(size: str) -> dict[str, Tensor]:
    """Return the batch of all steps, on the host."""
    config, samples, length = SIZES[size]
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab, (samples, length + 1), generator=drawn)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def piper_steps(options: argparse.Namespace) -> Iterator[float]:
    """Train with Piper, and yield the loss of each step."""
    config, _, _ = SIZES[options.size]
    batch = batch_of(options.size)
    job = piper.Job(
        model=partial(moe.MoEDecoder, dataclasses.replace(config, stages=1)),
        loss=moe.token_loss,
        data=lambda: [batch],
        strategy=[piper.place(piper.at(), [0])],
        optimizer=adamw,
        precision="bf16",
        seed=SEED,
    )
    on_gpu = options.device == "cuda"
    program = piper.compile(job, device=options.device, compile=on_gpu, cache=options.cache or None)
    with piper.launch(program, on="inline", graphs=options.side == "graphs") as run:
        while True:
            yield run.step(batch).loss


def titan_steps(options: argparse.Namespace) -> Iterator[float]:
    """Train with TorchTitan, and yield the loss of each step."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})
    prepare_for(options.device)
    trainer = titan_trainer(options)
    load_weights(trainer, options)
    logged: list[float] = []
    trainer.metrics_processor.should_log = lambda step: True
    trainer.metrics_processor.log = lambda step, mean, *_, **__: logged.append(mean)
    batches = trainer.batch_generator(trainer.dataloader)
    try:
        while True:
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(batches)
            yield logged[-1]
    finally:
        dist.destroy_process_group()


def titan_trainer(options: argparse.Namespace) -> Any:  # noqa: ANN401  TorchTitan is not installed where types are checked
    """Return TorchTitan's trainer of its Qwen3-MoE, of the same sizes."""
    config, samples, length = SIZES[options.size]
    on_gpu = options.device == "cuda"
    family, args = qwen3(config, on_gpu=on_gpu)
    batch = batch_of(options.size)
    words = {
        "training.seq_len": length,
        "training.local_batch_size": samples,
        "training.steps": options.steps,
        "metrics.log_freq": 1,
    }
    both = (batch["tokens"], batch["labels"])
    return built_trainer(family, args, lambda _: both, as_words(words, compiled=on_gpu), on_gpu=on_gpu)


def load_weights(trainer: Any, options: argparse.Namespace) -> None:  # noqa: ANN401
    """Give TorchTitan's model the weights of the seed."""
    config, _, _ = SIZES[options.size]
    torch.manual_seed(SEED)
    with torch.device(options.device):
        ours = moe.MoEDecoder(dataclasses.replace(config, stages=1)).state_dict()
    state = as_titan_experts(ours, config)
    (model,) = trainer.model_parts
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(state.pop(name.replace("_orig_mod.", "")))
    assert not state, f"TorchTitan has no {', '.join(state)}"


STEPS: Mapping[str, Callable[[argparse.Namespace], Iterator[float]]] = {
    "piper": piper_steps,
    "graphs": piper_steps,
    "torchtitan": titan_steps,
}


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Train as one side. Return its figures."""
    on_gpu = options.device == "cuda"
    begin = time.perf_counter()
    times, losses = [], []
    steps = STEPS[options.side](options)
    for step in range(options.steps):
        if on_gpu and step == options.steps // 2:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(float(next(steps)))
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    first = time.perf_counter() - begin - sum(times[1:])
    steps.close()  # type: ignore[attr-defined]
    ms = statistics.median(times[options.steps // 2 :]) * 1e3
    return {"ms": ms, "gib": memory, "losses": losses[:4], "last": losses[-1], "first_s": first}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES], default="small")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--cache", default="")
    parser.add_argument("--side", choices=SIDES, help="be one side")
    options = parser.parse_args(words)
    if options.side:
        print(json.dumps(measure(options)))
        return
    medians: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(options.rounds):
            for side in options.sides.split(","):
                given = ["--size", options.size, "--steps", str(options.steps), "--device", options.device]
                command = [sys.executable, "-m", "benchmarks.gpu_experts", "--side", side, "--cache", cache]
                run = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
                if run.returncode:
                    print(
                        f"{side:12} failed:", *run.stderr.strip().splitlines()[-6:], sep="\n    ", flush=True
                    )
                    continue
                found = json.loads(run.stdout.splitlines()[-1])
                medians.setdefault(side, []).append(found["ms"])
                losses = " ".join(f"{loss:.4f}" for loss in found["losses"])
                print(
                    f"{options.size:8}{side:12}{found['ms']:8.2f} ms {found['gib']:6.2f} GiB  "
                    f"losses {losses} ... {found['last']:.4f}  first step after {found['first_s']:.1f} s",
                    flush=True,
                )
    if graphs := medians.get("graphs"):
        for side in medians.keys() - {"graphs"}:
            ratio = statistics.median(graphs) / statistics.median(medians[side])
            print(f"graphs / {side}: {ratio:.3f}x of its time")


if __name__ == "__main__":
    main()
