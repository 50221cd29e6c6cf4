"""The full tensors of a checkpoint by name, each read when it is asked for."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from piper.checkpoint.folder import settled
from piper.checkpoint.json_state import dtype_named
from piper.checkpoint.metadata import DamagedError
from piper.checkpoint.read_record import read_record
from piper.checkpoint.storage import CheckpointReader, TensorRange
from piper.checkpoint.verified_files import StorageError


class Values(Mapping[str, Tensor]):
    """The parameters and buffers of a checkpoint. A tied parameter has its first name."""

    def __init__(self, path: Path | str) -> None:
        self.folder = settled(Path(path))
        self.record = read_record(self.folder)
        self.reader = CheckpointReader(self.folder, self.record)

    def __getitem__(self, name: str) -> Tensor:
        shape, stored = self.record.model[name].shape, self.record.tensors.get(f"model.{name}")
        if stored is None:  # nothing is stored of a tensor without elements
            return torch.empty(shape, dtype=dtype_named(self.record.model[name].dtype or "float32"))
        flat = torch.empty(stored.size, dtype=dtype_named(stored.dtype))
        try:
            self.reader.read([TensorRange(key=f"model.{name}", size=stored.size, start=0, tensor=flat)])
        except StorageError as error:
            raise DamagedError(self.folder, str(error)) from error
        return flat.view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.record.model)

    def __len__(self) -> int:
        return len(self.record.model)
