"""Writes the state of a run for other programs: weights, optimizer and step in plain PyTorch's names."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from piper.checkpoint.json_state import decode, dtype_named, encode, nested_state
from piper.checkpoint.load import Values
from piper.checkpoint.plain_state import Options, flattened
from piper.checkpoint.storage import write_file

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
