"""Checkpoints to and from other programs: Hugging Face's, and all that know plain PyTorch's names.

A run goes on from what another program saved: weights alone, or a whole training state.
"""

import json
import math
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from piper.capture.trace.build_model import build_fake
from piper.checkpoint.dcp import BROKEN, METADATA, DcpFolder
from piper.checkpoint.folder import step_path
from piper.checkpoint.huggingface import (
    Lazy,
    export_hf,
    import_hf,
    is_adapted,
    quiet,
    read_tensor,
    unreadable,
    write_export,
)
from piper.checkpoint.json_state import TensorAt, decode, encode
from piper.checkpoint.load import WAYS, Values
from piper.checkpoint.metadata import FILE, DamagedError, Record, Spec, Trainer, check_model
from piper.checkpoint.plain_state import (
    FORMATS,
    OPTIMIZER,
    SETTINGS,
    TORCH,
    Options,
    PlainExport,
    PlainState,
    find_state,
    flattened,
)
from piper.checkpoint.save import trainer_with
from piper.compiler import Program, compile
from piper.errors import ConfigError
from piper.job import Job
from piper.recipe import file_and_function
from piper.run.checkpointing import LET_SAVE, checkpoints_of, past_of, prepare_saves
from piper.run.driver_checkpoints import write_start
from piper.runtime.setup import build_model
from piper.runtime.trainers import Sizes, advance, hollow, make_optimizer, make_scheduler
from piper.train.run_folder import ABOUT, choose, claim, locked, prepare, read_about

CLOSE = 1e-6  # of a learning rate: the file's and the schedule's are equal up to rounding
DECOUPLED = "decoupled_weight_decay"
VARIES = (*WAYS, "initial_lr", "param_names", "differentiable", DECOUPLED)
# ^ options that a schedule adds, or that versions of torch have or do not have
Source = tuple[Mapping[str, object], set[str]]  # values by flat names, and which of them are tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A run that was made of a file of another program."""

    folder: Path
    step: int
    optimizer: bool  # whether the file had the optimizer's state


def import_start(recipe: str, job: Job, path: Path, out: Path | None) -> Imported:
    """Make the folder of a run that begins with what a file or folder of another program holds."""
    if job.checkpoint is None:
        what = "the job saves no checkpoints, so it cannot go on from one either"
        raise ConfigError(what, by=recipe, hint=LET_SAVE)
    if not path.exists():
        raise ConfigError("there is no such file or folder", by=str(path), hint="check the path")
    source = source_of(path)
    if source is None:
        model = fake_model(job)
        if is_adapted(model):
            raise ConfigError(
                "peft has wrapped the model, and a folder of weights is that of its base",
                by=recipe,
                hint="build the base with from_pretrained in the recipe: the run then starts from it",
            )
        values, trained = import_hf(path, model if hasattr(model, "save_pretrained") else None), None
        program = compile(job)
    else:
        program = compile(job)
        values, trained = state_in(program, path, source)
    folder = choose(out, recipe, resume=False)
    claim(folder)
    step = 0 if trained is None else trained[0].step
    with locked(folder):
        prepare(folder, job, resume=False)
        where = prepare_saves(folder, job, lambda path: False)
        assert where is not None, "the job has a checkpoint"
        write_start(program, values, step_path(where, step), trained)
    return Imported(folder=folder, step=step, optimizer=trained is not None)


def source_of(path: Path) -> Source | None:
    """Open a DCP folder, a file of torch.save, or an export of ours. None: a folder of weights alone."""
    if (path / METADATA).is_file():
        return (folder := DcpFolder(path)), folder.tensors
    file = path / TORCH if path.is_dir() else path
    if file.is_file():
        return torch_source(file)
    return safetensors_source(path) if (path / SETTINGS).is_file() else None


def torch_source(file: Path) -> Source:
    """Open a file of torch.save. Only tensors, numbers, text and containers are read."""
    try:
        state: object = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except BROKEN as error:
        refused = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))  # far down in torch's text
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise unreadable(file, f"it holds a {refused[1]}" if refused else why[0]) from error
    flat = dict(flattened(state))
    return flat, {name for name, value in flat.items() if isinstance(value, Tensor)}


def safetensors_source(folder: Path) -> Source:
    """Open an export in safetensors files: the weights, the optimizer's tensors and its options."""
    weights, file = import_hf(folder), folder / OPTIMIZER
    readers: dict[str, Callable[[], object]] = {
        f"model.{n}": partial(weights.__getitem__, n) for n in weights
    }
    try:
        settings = cast("dict[str, object]", decode(json.loads((folder / SETTINGS).read_bytes())))
        with safe_open(file, framework="pt") as opened:
            names: list[str] = [*opened.keys()]
        numbers = cast("Mapping[str, object]", settings["numbers"])
        plain = {"step": settings["step"], "optimizer.param_groups": settings["param_groups"]}
    except (*BROKEN, SafetensorError) as error:
        raise unreadable(folder, f"{type(error).__name__}: {error}") from error
    readers |= {f"optimizer.{name}": partial(read_tensor, file, name) for name in names}
    plain |= {f"optimizer.{name}": value for name, value in numbers.items()}
    return Lazy(readers | {name: partial(plain.__getitem__, name) for name in plain}), set(readers)


def state_in(
    program: Program, path: Path, source: Source
) -> tuple[Mapping[str, Tensor], tuple[Record, PlainState] | None]:
    """Return the weights in a source, and what it has of a training. None: it has weights alone."""
    outline = program.outline
    sizes = {p.name: p.shape for p in outline.parameters if p.trainable}
    optimizer, groups = grouped(program.job, sizes) if sizes else (None, [])
    names = {name for p in outline.parameters for name in (p.name, *p.aliases)}
    names |= {name for b in outline.buffers for name in b.saved_as}
    saved = saved_names(fake_model(program.job)).items()
    renamed = {name: several[0] for name, (_, several) in saved if several and name not in names}
    state = find_state(path, *source, names | renamed.keys(), groups)
    own = {renamed.get(name, name): partial(state.values.__getitem__, name) for name in state.values}
    state = replace(state, values=Lazy(own))
    if optimizer is None or not (state.kept or state.options):
        return state.values, None
    trainer = trainer_of(program.job, state, optimizer, groups)
    return state.values, (Record(step=state.step, seed=program.job.seed, trainer=trainer), state)


def trainer_of(job: Job, state: PlainState, optimizer: Optimizer, groups: Sequence[Sequence[str]]) -> Trainer:
    """Return the optimizer with the options of a file, and the job's schedule after its steps."""
    scheduler = None if job.scheduler is None else make_scheduler(job.scheduler, optimizer)
    for step in range(1, state.step + 1 if scheduler is not None else 1):
        advance(scheduler, job.scheduler, step)  # type: ignore[arg-type]  # neither is None
    options = []
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        saved = options_here(state, group, names)
        rate, here = float(cast(float, saved["lr"])), float(group["lr"])
        if scheduler is not None and not math.isclose(rate, here, rel_tol=CLOSE):
            raise ConfigError(
                "the job's schedule has another learning rate than the checkpoint",
                by=str(state.path),
                facts={"saved": f"{rate:g} after {state.step} steps", "here": f"{here:g}"},
                hint="give the job the schedule of the run that it continues",
            )
        options.append(saved)
    return trainer_with(optimizer, options, scheduler)


def options_here(state: PlainState, group: Mapping[str, object], names: Sequence[str]) -> Options:
    """Return the options of a group of the job's optimizer, as the file has them for its parameters."""
    here = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    given = {name: state.options[name] for name in names if name in state.options}
    if not given:
        return here
    first, saved = next(iter(given.items()))
    differ = sorted(key for key in here.keys() ^ saved.keys() if key not in VARIES)
    if DECOUPLED in here and here[DECOUPLED] != saved.get(DECOUPLED, here[DECOUPLED]):  # Adam, or AdamW
        differ.append(DECOUPLED)
    if differ:
        raise ConfigError(
            "the checkpoint has another optimizer than the job",
            by=str(state.path),
            facts={"differ in": ", ".join(differ)},
            hint="go on with the optimizer that the checkpoint was saved from",
        )
    for name, options in given.items():
        if encode(options, name) != encode(saved, first):
            raise ConfigError(
                "parameters of one group of the job's optimizer have other options in the checkpoint",
                by=str(state.path),
                facts={"parameters": f"{first}, {name}"},
                hint="give the job's optimizer the groups of the run that it continues",
            )
    return here | {key: value for key, value in saved.items() if key in here and key not in VARIES}


def fake_model(job: Job) -> nn.Module:
    """Return a job's model without memory for its parameters."""
    return build_fake(job.model, FakeTensorMode(), torch.float32, torch.device("cpu"))


def form_for(job: Job) -> str:
    """Return the format of an export that names none: hf for models of transformers, else safetensors."""
    model = fake_model(job)
    known = is_adapted(model) or is_adapted(model, "transformers", "PreTrainedModel")
    return "hf" if known else "safetensors"


def export_values(
    job: Job, values: Mapping[str, Tensor], folder: Path, *, adapter: bool, dtype: torch.dtype | None
) -> str:
    """Write a job's values as an export, merged or as an `adapter` of peft; return the class they are for."""
    model = fake_model(job)
    weights = {name: values[name] for name in model.state_dict() if name in values}
    if is_adapted(model):
        model = build_model(job, torch.device("cpu"))
        model.load_state_dict(weights, strict=False)
        if not adapter:
            model = cast(Any, model).merge_and_unload()
            weights = model.state_dict()
    elif adapter:
        what = f"a {type(model).__name__} has no adapter"
        raise ConfigError(what, by="--format peft", hint="export all of it: --format hf")
    if adapter:
        with quiet():
            write_export(folder, cast(Any, model if dtype is None else model.to(dtype)).save_pretrained)
    else:
        export_hf(weights, model, folder, dtype)
    return type(model).__name__


def export_state(job: Job, values: Values, folder: Path, *, form: str, dtype: torch.dtype | None) -> str:
    """Write weights, optimizer and step of a checkpoint for other programs; return the class of the model."""
    model = fake_model(job)
    names, wanted, extra = dict[str, str](), dict[str, Spec](), list[str]()
    for name, (value, several) in saved_names(model).items():
        if several:
            names[name] = own = next((each for each in several if each in values), several[0])
            wanted[own] = Spec(shape=tuple(value.shape))
        else:
            extra.append(name)
    if extra:
        sys.stderr.write(f"left out: what the model's state_dict() adds ({', '.join(extra)})\n")
    record = values.record
    saved = {
        name: spec for name, spec in record.values.items() if name in wanted or spec.trainable is not None
    }
    check_model(values.folder, replace(record, model=saved), wanted)
    check_kept(record, form)
    groups: list[tuple[Options, Sequence[str]]] = []
    if record.trainer.groups is not None:
        sizes = {name: spec.shape for name, spec in record.model.items() if spec.trainable}
        optimizer, members = grouped(job, sizes)
        given = cast("list[dict[str, object]]", decode(record.trainer.groups))
        for options, here, own_names in zip(given, optimizer.param_groups, members, strict=True):
            kept = {key: value for key, value in options.items() if key != "param_names"}
            groups.append((kept | {key: here[key] for key in WAYS if key in here}, own_names))
    export = PlainExport(values=values, model=names, groups=groups, dtype=dtype)
    write_export(folder, lambda partial: FORMATS[form](export, partial))
    return type(model).__name__


def saved_names(model: nn.Module) -> dict[str, tuple[Any, list[str]]]:
    """Return what a `state_dict` has by name, with the names of that parameter or buffer, if it is one.

    Hooks of a `state_dict` may call a parameter otherwise, and `get_extra_state` adds what is none.
    """
    own: dict[int, list[str]] = {}
    of = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, value in chain(*of):
        own.setdefault(id(value), []).append(name)
    saved = model.state_dict(keep_vars=True).items()
    return {name: (value, own.get(id(value), [])) for name, value in saved}


def check_kept(record: Record, form: str) -> None:
    """Refuse an export without a place for what the optimizer keeps in lists; say what is left out of any."""
    for name, keys in record.numbers.items():
        for key, value in keys.items():
            nested = any(isinstance(leaf, TensorAt) for leaf in tree_leaves(decode(value)))
            if nested and form != "torch":
                raise ConfigError(
                    "the optimizer keeps tensors in lists or dicts, for which this format has no names",
                    by=f"--format {form}",
                    facts={"state": f"optimizer.{name}.{key}"},
                    hint="--format torch has them; --format hf has the weights alone",
                )
    if record.trainer.own is not None:
        own = ", ".join(cast("dict[str, object]", decode(record.trainer.own)))
        sys.stderr.write(f"left out: what {record.trainer.optimizer} keeps for no parameter ({own})\n")


def grouped(job: Job, sizes: Sizes) -> tuple[Optimizer, list[list[str]]]:
    """Return a job's optimizer over parameters without elements, and the names in each of its groups."""
    named = hollow(sizes)
    optimizer = make_optimizer(job.optimizer, named)
    names = {id(tensor): name for name, tensor in named}
    return optimizer, [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def recipe_of_run(folder: Path) -> str:
    """Return the recipe of a run, or of the run that a checkpoint lies in: as it was when the run started."""
    for place in (folder, *folder.absolute().parents[:2]):
        recipe, kept = read_about(place).get("recipe"), place / "recipe.py"
        if recipe is None or not kept.is_file():
            continue
        file, function = file_and_function(str(recipe))
        same = Path(file).is_file() and Path(file).read_bytes() == kept.read_bytes()
        return str(recipe) if same else f"{kept}:{function}"
    raise ConfigError(
        "there is no run here, or it does not say which recipe it ran",
        by=str(folder),
        facts={"looked": f"for {ABOUT} and recipe.py"},
        hint="name the folder that `piper train --out DIR` wrote, or add --recipe file.py:function",
    )


def checkpoint_of(folder: Path, job: Job) -> Path:
    """Return the checkpoint that a path names: itself, or the newest of a run's folder."""
    if (folder / FILE).is_file():
        return folder
    past = [] if checkpoints_of(folder, job) is None else past_of(folder, job)
    for checkpoint in past:
        if not isinstance(checkpoint, DamagedError):
            return checkpoint
        why = f"is damaged ({checkpoint.why}): looking for an earlier checkpoint"
        sys.stderr.write(f"{checkpoint.path} {why}\n")
    raise ConfigError(
        "this run has no complete checkpoint",
        by=str(folder),
        facts={"looked": f"in {checkpoints_of(folder, job) or 'a folder that the job does not name'}"},
        hint=LET_SAVE,
    )
