"""Reads and writes the state of a training as other programs save it: weights, optimizer and step, by name.

What is read is flat: names joined by dots, as DCP has them. These forms are known, below any prefix:

model.NAME or NAME                     a parameter or buffer
optimizer.state.NAME.KEY               what the optimizer keeps; NAME may be a number, as torch counts them
optimizer.param_groups.0.KEY           options of a group, whose `params` are names or numbers
optimizer.param_groups.NAME.KEY        options of one parameter, as TorchTitan has them
train_state.step, step, global_step    the steps that are done
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from piper.checkpoint.huggingface import Lazy
from piper.checkpoint.json_state import decode, dtype_named, encode, nested_state
from piper.checkpoint.load import Values
from piper.checkpoint.storage import write_file
from piper.errors import ConfigError
from piper.ir.format import listed

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
KEPT = re.compile(r"(?:^|\.)state\.")
GROUPS = re.compile(r"(?:^|\.)param_groups(?:\.|$)")
STEPS = ("train_state.step", "step", "global_step")
BESIDE = ("train_state.", "lr_scheduler.", "dataloader.")  # of TorchTitan, next to unprefixed parameters
Options = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainState:
    """The state of a training in plain PyTorch's names."""

    path: Path
    values: Mapping[str, Tensor]  # parameters and buffers
    source: Mapping[str, object]
    kept: Mapping[str, Mapping[str, str]]  # what the optimizer keeps: parameter -> key -> name in the source
    options: Mapping[str, Options]  # of the optimizer, by parameter
    step: int


def find_state(
    path: Path,
    source: Mapping[str, object],
    tensors: Collection[str],
    names: Collection[str],
    groups: Sequence[Sequence[str]],
) -> PlainState:
    """Find the state of a model in a source. path: for messages. tensors: which names in it are of tensors.

    names: of the model's parameters and buffers. groups: the names in each group of its optimizer.
    """
    keys = {WRAPPERS.sub("", key): key for key in source}
    model = model_prefix(keys, names)
    optimizer = optimizer_prefix(path, keys, names)
    own = () if optimizer is None else (f"{optimizer}state.", f"{optimizer}param_groups.")
    values = {
        key.removeprefix(model): key
        for key, given in keys.items()
        if given in tensors and key.startswith(model) and not key.startswith(own)
    }
    if not model:
        values = {key: key for key in values if not key.startswith(BESIDE) and key not in STEPS}
    kept: dict[str, dict[str, str]] = {}
    options: dict[str, Options] = {}
    if optimizer is not None:
        numbered, options = options_of(path, source, keys, optimizer, names, groups)
        kept = kept_state(path, keys, optimizer, names, numbered)
    return PlainState(
        path=path,
        values=Lazy({name: partial(source.__getitem__, keys[key]) for name, key in values.items()}),
        source=source,
        kept=kept,
        options=options,
        step=step_of(source, keys, kept),
    )


def model_prefix(keys: Collection[str], names: Collection[str]) -> str:
    """Return what stands before the names of the model in a source: of several, what fits most names."""
    fits: Counter[str] = Counter()
    for key in keys:
        for start in (match.start() for match in re.finditer(r"^|(?<=\.)", key)):
            if key[start:] in names:
                fits[key[:start]] += 1
    return max(fits, key=lambda prefix: (fits[prefix], prefix in ("", "model."), -len(prefix)), default="")


def optimizer_prefix(path: Path, keys: Collection[str], names: Collection[str]) -> str | None:
    """Return what stands before the optimizer's part of a source. None: there is no optimizer."""
    prefixes = set()
    for key in keys:
        for match in KEPT.finditer(key):
            owner = key[match.end() :].rpartition(".")[0]
            if owner in names or owner.isdigit():
                prefixes.add(key[: match.start()])
        if (group := GROUPS.search(key)) is not None:
            prefixes.add(key[: group.start()])
    if len(prefixes) > 1:
        raise ConfigError(
            "there are several optimizers in this checkpoint, and a job has one",
            by=str(path),
            facts={"optimizers": listed(sorted(prefixes))},
            hint="save the one that the job goes on with",
        )
    return next((f"{prefix}." if prefix else "" for prefix in prefixes), None)


def options_of(
    path: Path,
    source: Mapping[str, object],
    keys: Mapping[str, str],
    prefix: str,
    names: Collection[str],
    groups: Sequence[Sequence[str]],
) -> tuple[dict[str, str], dict[str, Options]]:
    """Return the names of parameters by the optimizer's numbers, and the options of each parameter."""
    start = f"{prefix}param_groups"
    by_number: dict[int, dict[str, object]] = {}
    by_name: dict[str, dict[str, object]] = {}
    if start in keys:  # all groups as one value
        whole = cast("Sequence[Mapping[str, object]]", source[keys[start]])
        by_number = {number: dict(group) for number, group in enumerate(whole)}
    for key, given in keys.items():
        if not key.startswith(f"{start}."):
            continue
        owner, _, option = key.removeprefix(f"{start}.").rpartition(".")
        if owner not in names and not owner.isdigit():
            raise unknown_names(path, [key])
        table = by_name.setdefault(owner, {}) if owner in names else by_number.setdefault(int(owner), {})
        table[option] = source[given]
    ordered = [by_number[number] for number in sorted(by_number)]
    members = [cast("list[object]", g.pop("param_names", None) or g.get("params", [])) for g in ordered]
    ids = [cast("list[object]", g.pop("params", [])) for g in ordered]
    if any(isinstance(member, int) for one in members for member in one):
        saved, here = ([str(len(one)) for one in several] for several in (members, groups))
        if saved != here:
            raise ConfigError(
                "the optimizer has its parameters by number, in other groups than the job's optimizer",
                by=str(path),
                facts={"saved": f"groups of {listed(saved)}", "here": f"groups of {listed(here)}"},
                hint="save names: torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)",
            )
        members = [list(one) for one in groups]
    numbered: dict[str, str] = {}
    for group, one, several in zip(ordered, ids, members, strict=True):
        numbered |= {str(number): str(name) for number, name in zip(one, several, strict=True)}
        by_name |= {str(name): group for name in several}
    if strange := [name for name in by_name if name not in names]:
        raise unknown_names(path, strange)
    return numbered, dict(by_name)


def kept_state(
    path: Path, keys: Mapping[str, str], prefix: str, names: Collection[str], numbered: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the names in the source of what the optimizer keeps for each parameter."""
    kept: dict[str, dict[str, str]] = {}
    strange = []
    for key, given in keys.items():
        if not key.startswith(f"{prefix}state."):
            continue
        owner, _, what = key.removeprefix(f"{prefix}state.").rpartition(".")
        owner = numbered.get(owner, owner)
        if owner in names:
            kept.setdefault(owner, {})[what] = given
        else:
            strange.append(key)
    owners = {*names, *numbered}
    for key in strange:
        own = key.removeprefix(f"{prefix}state.").split(".")
        if any(".".join(own[:length]) in owners for length in range(1, len(own))):
            raise nested_tensors(path, key)
    if strange:
        raise unknown_names(path, strange)
    return kept


def nested_tensors(path: Path, key: str) -> ConfigError:
    """Return the error for tensors that an optimizer keeps inside of other values."""
    return ConfigError(
        "the optimizer keeps tensors in lists, tuples or dicts, which cannot be imported",
        by=str(path),
        facts={"state": key},
        hint="import a file of the weights alone, or keep each tensor by itself in state[parameter]",
    )


def unknown_names(path: Path, strange: Sequence[str]) -> ConfigError:
    """Return the error for an optimizer of another model."""
    return ConfigError(
        "the optimizer's state is for parameters that the model does not have",
        by=str(path),
        facts={"unknown": listed(strange)},
        hint="import it with a recipe that builds the model it was saved from",
    )


def step_of(
    source: Mapping[str, object], keys: Mapping[str, str], kept: Mapping[str, Mapping[str, str]]
) -> int:
    """Return the steps that are done: as the source says, else as the optimizer counts them, else 0."""
    named = next((keys[key] for key in STEPS if key in keys), None)
    counted = next((state["step"] for state in kept.values() if "step" in state), None)
    step = source[named] if named is not None else 0 if counted is None else source[counted]
    return int(step.item() if isinstance(step, Tensor) else cast(int, step))


def flattened(state: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of nested containers with flat names, as DCP flattens them."""
    if isinstance(state, Mapping) and state:
        for key, value in state.items():
            yield from flattened(value, f"{prefix}{key}.")
    elif isinstance(state, list) and any(isinstance(value, Mapping | torch.Tensor) for value in state):
        for number, value in enumerate(state):
            yield from flattened(value, f"{prefix}{number}.")
    else:
        yield prefix.removesuffix("."), state


WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
SETTINGS, TORCH = "optimizer.json", "checkpoint.pt"
State = Mapping[str, object]
KeptState = Mapping[str, State]  # what the optimizer keeps, by parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainExport:
    """What is written: shapes of tensors, and where each is read. Keys are those of the record."""

    values: Values
    model: Mapping[str, str]  # every name in the model's state_dict -> the name in the record
    groups: Sequence[tuple[Options, Sequence[str]]]  # of the optimizer: options, and names of parameters
    dtype: torch.dtype | None = None  # what to write parameters and buffers as. None: as they are

    def shapes(self) -> tuple[State, KeptState]:
        """Return the model's state and the optimizer's by name, where a tensor is a `StoredTensor`."""
        record = self.values.record
        model: dict[str, StoredTensor] = {}
        for name, own in self.model.items():
            dtype = self.values.dtype(own)
            written = self.dtype if self.dtype is not None and dtype.is_floating_point else dtype
            key, whole = f"model.{own}", record.model[own].shape
            model[name] = StoredTensor(key=key, shape=whole, dtype=dtype, written=written)
        kept: dict[str, dict[str, object]] = {}
        trained = {name for _, names in self.groups for name in names}  # and none that is frozen by now
        for name, keys in record.moments.items():
            for key, shape in keys.items() if name in trained else ():
                whole = record.model[name].shape if shape is None else shape
                stored = f"optimizer.{name}.{key}"
                dtype = dtype_named(record.tensors[stored].dtype)
                kept.setdefault(name, {})[key] = StoredTensor(key=stored, shape=whole, dtype=dtype)
        for name, numbers in record.numbers.items():
            if name in trained:
                kept.setdefault(name, {}).update({key: decode(value) for key, value in numbers.items()})
        return model, {name: nested_state(state) for name, state in kept.items()}

    def read(self, stored: "StoredTensor") -> Tensor:
        value = self.values.tensor(stored.key, stored.shape, stored.dtype)
        return value if stored.written is None else value.to(stored.written)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint that has not been read."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    written: torch.dtype | None = None  # the type to write. None: as it is

    def hollow(self) -> Tensor:
        """Return a tensor of the shape and type to write, without elements."""
        return torch.empty(self.shape, dtype=self.written or self.dtype, device="meta")


def export_dcp(export: PlainExport, folder: Path) -> None:
    """Write what `get_state_dict(model, optimizer)` has, as `{"model": ..., "optimizer": ...}`."""
    model, kept = export.shapes()
    groups = [{**options, "params": [*names]} for options, names in export.groups]
    optimizer = {"state": kept, "param_groups": groups}
    step = {"step": export.values.record.step}
    write_nested(export, folder, {"model": model, "optimizer": optimizer, "train_state": step})


def export_torchtitan(export: PlainExport, folder: Path) -> None:
    """Write what TorchTitan's checkpoints have: parameters without a prefix, options by parameter."""
    model, kept = export.shapes()
    flat = {f"state.{name}.{key}": value for name, keys in kept.items() for key, value in keys.items()}
    for options, names in export.groups:
        flat |= {f"param_groups.{name}.{key}": value for name in names for key, value in options.items()}
    step = export.values.record.step
    beside = {"lr_scheduler": {"last_epoch": step}, "train_state": {"step": step, "ntokens_seen": 0}}
    write_nested(export, folder, {**model, "optimizer": flat, **beside})


def write_nested(export: PlainExport, folder: Path, state: State) -> None:
    """Write a nested state as a DCP folder, one tensor at a time."""
    # takes long to import
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
    from torch.distributed.checkpoint.state_dict_saver import save

    stored = {key: value for key, value in flattened(state) if isinstance(value, StoredTensor)}
    hollow = tree_map_only(StoredTensor, StoredTensor.hollow, dict(state))

    class ReadingPlanner(DefaultSavePlanner):
        """Reads a tensor when it is written."""

        def transform_object(self, write_item: WriteItem, object: object) -> object:
            if write_item.type == WriteItemType.BYTE_IO:
                return super().transform_object(write_item, object)
            return export.read(stored[write_item.index.fqn])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        save(hollow, storage_writer=FileSystemWriter(folder), planner=ReadingPlanner(), no_dist=True)


def export_safetensors(export: PlainExport, folder: Path) -> None:
    """Write weights and optimizer as two safetensors files, and the optimizer's options as JSON."""
    model, kept = export.shapes()
    for file, state in ((WEIGHTS, model), (OPTIMIZER, {"state": kept})):
        flat = dict(flattened(state))
        stored = {key: value for key, value in flat.items() if isinstance(value, StoredTensor)}
        hollow = {key: value.hollow() for key, value in stored.items()}
        write_file(folder / file, hollow, lambda key, stored=stored: export.read(stored[key]))  # type: ignore[misc]
    numbers = {key: value for key, value in flat.items() if key and key not in stored}
    groups = [{**options, "params": [*names]} for options, names in export.groups]
    settings = {"step": export.values.record.step, "param_groups": groups, "numbers": numbers}
    (folder / SETTINGS).write_text(json.dumps(encode(settings, "optimizer")) + "\n", encoding="utf-8")


def export_torch(export: PlainExport, folder: Path) -> None:
    """Write one file for `torch.load`, with the state_dicts of the model and of its optimizer."""
    model, kept = export.shapes()
    numbers = {name: i for i, name in enumerate(name for _, names in export.groups for name in names)}
    groups = [
        {**options, "params": [numbers[name] for name in names], "param_names": [*names]}
        for options, names in export.groups
    ]
    optimizer = {"state": {numbers[name]: keys for name, keys in kept.items()}, "param_groups": groups}
    state = {"model": model, "optimizer": optimizer, "step": export.values.record.step}
    torch.save(tree_map_only(StoredTensor, export.read, state), folder / TORCH)


FORMATS: Mapping[str, Callable[[PlainExport, Path], None]] = {
    "dcp": export_dcp,
    "torchtitan": export_torchtitan,
    "safetensors": export_safetensors,
    "torch": export_torch,
}
