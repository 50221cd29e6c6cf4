"""Weights in and out of Hugging Face folders: safetensors files, with names as transformers has them.

export_hf(run.state_dict(), model, "out")                # type(model).from_pretrained("out")
write_start(program, import_hf("in"), "start")           # launch(program, resume="start")
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from piper.checkpoint.folder import begun, take_place
from piper.checkpoint.metadata import differences_in
from piper.checkpoint.storage import sync
from piper.checkpoint.target import EXPORT, MARK, target_of
from piper.errors import ConfigError
from piper.version import VERSION

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")  # how a folder stores one expert


def export_hf(
    state: Mapping[str, Tensor],
    model: "PretrainedConfig | PreTrainedModel",
    folder: Path | str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model that `from_pretrained` reads, all at once or not at all.

    state: every parameter by transformers' own name, as `run.state_dict()` has them.
    model: the model that the job builds, whose class and config are used. A config alone is that of a causal
    language model.
    folder: a new or empty one, or an earlier export, which is replaced. Anything else is refused.
    dtype: what to write them as; None: as they are.
    """
    skeleton = shell(model)
    ties = ties_of(skeleton)
    check_names(skeleton, state, ties)
    given = {names[0]: state[next(name for name in names if name in state)] for names in ties}
    for name, value in given.items() if dtype is not None else ():
        given[name] = value.to(dtype) if value.is_floating_point() else value
    kinds = {value.dtype for value in given.values() if value.is_floating_point()}
    skeleton.to(kinds.pop() if len(kinds) == 1 else torch.float32)

    with quiet():
        write_export(folder, partial(skeleton.save_pretrained, state_dict=given))


def write_export(folder: Path | str, write: Callable[[Path], object]) -> None:
    """Write a folder for other programs by a function of it, marked as ours, all at once or not at all."""
    path = target_of(folder)
    with begun(path) as partial:
        mark_export(partial, [])  # from now on all in it is ours, also if this is interrupted
        write(partial)
        mark_export(partial, sorted(file.name for file in partial.iterdir()))
        for file in partial.iterdir():
            sync(file)
        take_place(path)


def mark_export(folder: Path, files: list[str]) -> None:
    """Write the mark that says that a folder is an export of ours, and lists its files."""
    text = json.dumps({"format": EXPORT, "piper": VERSION, "files": [name for name in files if name != MARK]})
    (folder / MARK).write_text(text + "\n", encoding="utf-8")


def shell(model: "PretrainedConfig | PreTrainedModel") -> Any:  # noqa: ANN401  transformers has no types for it
    """Return a model of the same class and config, without any memory for its parameters."""
    from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

    with torch.device("meta"):
        if isinstance(model, PretrainedConfig):
            return AutoModelForCausalLM.from_config(model)
        if isinstance(model, PreTrainedModel):
            return type(model)(model.config)
    raise ConfigError(
        f"a {type(model).__name__} is not a model of transformers",
        by="export_hf",
        hint="export other models with --format safetensors, torch or dcp; run.state_dict() has their values",
    )


def ties_of(model: nn.Module) -> list[list[str]]:
    """Return the names of each value of a model: several names where the value is tied."""
    groups: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(value), []).append(name)
    return [*groups.values()]


def check_names(model: nn.Module, state: Mapping[str, Tensor], ties: list[list[str]]) -> None:
    """Refuse a state that is not this model's. A tied parameter needs one of its names."""
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    missing = [names[0] for names in ties if not any(name in state for name in names)]
    unexpected = [name for name in state if name not in shapes]
    differ = [
        f"{name}: {list(state[name].shape)} given, {list(shape)} wanted"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if facts := differences_in(missing, unexpected, differ):
        raise ConfigError(
            f"the state is not that of a {type(model).__name__} of this config",
            by="export_hf",
            facts=facts,
            hint="pass run.state_dict() and the config of the model that the job builds",
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from drawing a progress bar, and from reports that our errors make."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def is_adapted(model: nn.Module, library: str = "peft", kind: str = "PeftModel") -> bool:
    """Return whether a model is of a class of another library, such as what peft has wrapped."""
    imported = sys.modules.get(library)  # not imported for this: such a model has done so
    return imported is not None and isinstance(model, getattr(imported, kind))


def import_hf(folder: Path | str, model: "PreTrainedModel | None" = None) -> Mapping[str, Tensor]:
    """Return the weights in a Hugging Face folder, by their transformers names, each read when asked for.

    A folder stores every expert of Qwen3-MoE by itself; transformers, and so this, has those of a layer in
    one tensor.

    model: of the class and config that the weights are for. Where a folder has other names, as those of
    Mixtral do, transformers then converts them, and all weights are read at once.
    """
    weights = weights_in(Path(folder))
    if model is None or all(any(name in weights for name in names) for names in ties_of(model)):
        return weights
    return converted(Path(folder), model)


def converted(folder: Path, model: "PreTrainedModel") -> Mapping[str, Tensor]:
    """Return the weights in a folder as transformers loads them into a model of this class and config."""
    try:
        with quiet():
            loaded, info = type(model).from_pretrained(
                folder, config=model.config, output_loading_info=True, use_safetensors=True
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise unreadable(folder, str(error)) from error
    if facts := differences_in(sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), ()):
        raise ConfigError(
            f"the weights are not all of a {type(model).__name__}",
            by="import_hf",
            facts={"path": str(folder), **facts},
            hint="to let the model make what is missing, build it with from_pretrained in the recipe",
        )
    state: dict[str, Tensor] = loaded.state_dict()
    return state


class Lazy(Mapping[str, Any]):
    """Values by name, each read when asked for."""

    def __init__(self, readers: Mapping[str, Callable[[], object]]) -> None:
        self.readers = readers

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  whatever its reader returns
        return self.readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)


def weights_in(folder: Path) -> Lazy:
    """Return the tensors of a folder of safetensors files by name, each layer's experts fused into one."""
    files = files_of(folder)
    experts: dict[str, int] = {}
    for match in filter(None, map(EXPERT.fullmatch, files)):
        experts[match[1]] = max(experts.get(match[1], 0), int(match[2]) + 1)

    def read(name: str) -> Tensor:
        return read_tensor(folder / files[name], name)

    def fused(layer: str, *parts: str) -> Tensor:
        names = [[f"{layer}.{e}.{part}_proj.weight" for part in parts] for e in range(experts[layer])]
        return torch.stack([torch.cat([*map(read, each)]) for each in names])

    readers = {f"{layer}.down_proj": partial(fused, layer, "down") for layer in experts}
    readers |= {f"{layer}.gate_up_proj": partial(fused, layer, "gate", "up") for layer in experts}
    return Lazy(readers | {name: partial(read, name) for name in files if not EXPERT.fullmatch(name)})


def read_tensor(file: Path, name: str) -> Tensor:
    """Read one tensor of a safetensors file."""
    try:
        with safe_open(file, framework="pt") as opened:
            return cast(Tensor, opened.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise unreadable(file, f"{name}: {error}") from error


def files_of(folder: Path) -> dict[str, str]:
    """Return the file that holds each tensor of a folder, by the tensor's name."""
    try:
        if (folder / INDEX).exists():
            files: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            for file in set(files.values()):
                if Path(file).name != file or not (folder / file).is_file():
                    raise unreadable(folder, f"{INDEX} names {file!r}, which is not a file of the folder")
            return files
        with safe_open(folder / SINGLE, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SINGLE)
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(folder, f"{type(error).__name__}: {error}") from error


def unreadable(path: Path, why: str) -> ConfigError:
    """Return the error for a file or folder of another program that cannot be read."""
    return ConfigError(
        "this checkpoint cannot be read",
        by=str(path),
        facts={"why": why},
        hint=f"give a whole one: a DCP folder, a folder with {SINGLE} or {INDEX}, or a file of torch.save "
        "that holds tensors, numbers, text and containers only",
    )
