"""The recipes of the pages have the losses of the systems themselves, which `make systems` installs: no dependency of ours."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.docs.blocks import blocks_of

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STAND_INS = """
import importlib.util, sys, types


def stand_in(package, module, *names):  # for a module that needs a package which is not here, and is not used
    if importlib.util.find_spec(package) is None:
        sys.modules[module] = types.ModuleType(module)
        vars(sys.modules[module]).update(dict.fromkeys(names))


stand_in("triton", "torchtitan.models.moe.kernels", "generate_permute_indices")
loaders = ("build_text_dataloader", "build_text_validation_dataloader", "HuggingFaceTextDataset")
stand_in("datasets", "torchtitan.hf_datasets.text_datasets", *loaders)
"""
TITAN_MODEL = """
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

SIZES = dict(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=64, multiple_of=32, max_seq_len=16)
ARGS = TransformerModelArgs(**SIZES)


def build():
    return Transformer(ARGS)
"""
TITAN = """
import dataclasses, json, types
import torch

torch._utils._get_available_device_type = lambda: "cpu"  # it would look for a GPU
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import ConfigManager
from torchtitan.models import llama3
from torchtitan.protocols import train_spec
from torchtitan.train import Trainer

from model import ARGS, batches
from theirs import adam, config, rates, training


class Rows(BaseDataLoader):
    def __init__(self, dp_rank, dp_world_size, **_):
        self.rank, self.world = dp_rank, dp_world_size

    def __iter__(self):
        for batch in batches():
            tokens, labels = (batch[name].chunk(self.world)[self.rank] for name in ("tokens", "labels"))
            yield {"input": tokens}, labels

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def no_metrics(*_):
    peak = types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    monitor = types.SimpleNamespace(device_name="cpu", get_peak_stats=lambda: peak)
    color = types.SimpleNamespace(blue="", red="", reset="", yellow="")
    return types.SimpleNamespace(
        color=color, device_memory_monitor=monitor, ntokens_since_last_log=0, data_loading_times=[]
    )


spec = dataclasses.replace(
    llama3.get_train_spec(),
    model_args={"small": ARGS},
    build_tokenizer_fn=None,
    build_dataloader_fn=lambda **options: Rows(**options),
    build_metrics_processor_fn=no_metrics,
    state_dict_adapter=None,
)
train_spec.register_train_spec("ours", spec)
options = {
    "model.name": "ours",
    "model.flavor": "small",
    "training.seq_len": 16,
    "training.mixed_precision_param": "float32",
    "activation_checkpoint.mode": "none",
    "debug.seed": 0,
    "job.dump_folder": "outputs",
    **{f"training.{name}": training[name] for name in ("local_batch_size", "steps", "max_norm")},
    **{f"optimizer.{name}": value for name, value in adam.items()},
    **{f"lr_scheduler.{name}": value for name, value in rates.items()},
    **{f"parallelism.{name}": value for name, value in config["parallelism"].items()},
    "checkpoint.interval": config["checkpoint"]["interval"],
}
words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
trainer = Trainer(ConfigManager().parse_args([*words, "--checkpoint.enable"]))
for part in trainer.model_parts:
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
losses = []
trainer.metrics_processor.should_log = lambda step: True
trainer.metrics_processor.log = lambda step, mean, worst, norm, **_: losses.append(mean)
data = trainer.batch_generator(trainer.dataloader)
for _ in range(training["steps"]):
    trainer.step += 1
    trainer.train_step(data)
    if trainer.step == 4:
        trainer.checkpointer.save(4, last_step=False)
if dist.get_rank() == 0:
    json.dump(losses, open("losses.json", "w"))
dist.destroy_process_group()
"""
MEGATRON = """
import json, sys
from contextlib import nullcontext
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from gpt import HEADS, LAYERS, LENGTH, STEPS, VOCABULARY, WIDTH, batches


class Tracker:  # of CUDA's generators, which no dropout needs here
    def fork(self, *_, **__):
        return nullcontext()

    def is_initialized(self):
        return True


tracker = Tracker()
for module in [*sys.modules.values()]:
    if module.__name__.startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
        module.get_cuda_rng_tracker = lambda *_, **__: tracker
torch.cuda.current_device = lambda: torch.device("cpu")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
torch.manual_seed(0)
unfused = ("gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion")
config = TransformerConfig(
    num_layers=LAYERS,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    tensor_model_parallel_size=2,
    use_cpu_initialization=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    **dict.fromkeys(unfused, False),
)
model = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
    vocab_size=VOCABULARY,
    max_sequence_length=LENGTH,
    share_embeddings_and_output_weights=False,
)
divided = lambda p: getattr(p, "tensor_model_parallel", False)
start = {}
for name, p in model.named_parameters():
    parts = [torch.empty_like(p) for _ in range(2)]
    dist.all_gather(parts, p.detach().contiguous())
    dim = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
    start[name] = torch.cat(parts, dim) if divided(p) else parts[0]
if dist.get_rank() == 0:
    torch.save(start, "start.pt")
every = [*model.parameters()]
groups = [
    {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.01},
    {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
positions, mask = torch.arange(LENGTH), torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
losses = []
for _, batch in zip(range(STEPS), batches()):
    total = 0.0
    for tokens, labels in zip(batch["tokens"].split(2), batch["labels"].split(2)):
        loss = model(tokens, positions.expand_as(tokens), mask, labels=labels.contiguous()).mean() / 8
        loss.backward()
        total += loss.item()
    square = sum(p.grad.square().sum() for p in every if divided(p) or dist.get_rank() == 0)
    dist.all_reduce(square)
    for p in every:
        p.grad.mul_(min(1.0, 1.0 / (square.sqrt().item() + 1e-6)))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(total)
if dist.get_rank() == 0:
    json.dump(losses, open("losses.json", "w"))
dist.destroy_process_group()
"""


def run(folder: Path, *words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = warm.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def write_files(page: str, folder: Path) -> None:
    """Write the files of a page."""
    for block in blocks_of((ROOT / "docs" / page).read_text(encoding="utf-8"), page):
        if block.file is not None:
            (folder / block.file).write_text(block.text)


def largest_difference(folder: Path, recipe: str, start: str, steps: int) -> float:
    """Import and train a recipe, and return how far its losses are from those of the other system."""
    run(folder, "piper", "import", f"recipe.py:{recipe}", start, "--out", recipe)
    run(folder, "piper", "train", f"recipe.py:{recipe}", "--out", recipe, "--resume", "--on", "inline")
    ours: list[float] = [
        json.loads(line)["loss"] for line in (folder / recipe / "metrics.jsonl").read_text().splitlines()
    ]
    theirs: list[float] = json.loads((folder / "losses.json").read_text())[-steps:]
    assert len(set(theirs)) == steps, "each step has a loss of its own"
    return max(abs(a - b) for a, b in zip(theirs, ours, strict=True))


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def test_a_run_of_torchtitan_goes_on(tmp_path: Path) -> None:
    needs("torchtitan")
    write_files("from-torchtitan.md", tmp_path)
    page = (tmp_path / "model.py").read_text()
    data = (
        "from collections.abc import Iterator\n\nimport torch\nfrom torch import Tensor\n\n\n"
        + page[page.index("def batches") :]
    )
    (tmp_path / "model.py").write_text(STAND_INS + TITAN_MODEL + "\n\n" + data)
    (tmp_path / "titan.py").write_text(STAND_INS + TITAN)
    run(tmp_path, "torch.distributed.run", "--nproc-per-node", "2", "titan.py")
    assert largest_difference(tmp_path, "pipeline", "outputs/checkpoint/step-4", 20) < 1e-5


def test_megatron_core_has_the_losses_of_the_recipe(tmp_path: Path) -> None:
    needs("megatron")
    write_files("from-megatron.md", tmp_path)
    (tmp_path / "megatron_gpt.py").write_text(MEGATRON)
    run(tmp_path, "torch.distributed.run", "--nproc-per-node", "2", "megatron_gpt.py")
    assert largest_difference(tmp_path, "tp2_pp2_dp2", "start.pt", 20) < 1e-5  # the page checks `tp2` in fp64
