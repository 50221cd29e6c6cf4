"""Language modelling from one long row of tokens: a mapped file, or a text small enough to hold."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from piper.data.batches import Batch, Batches, Places
from piper.data.tokenizers import DTYPE, ByteTokenizer, Tokenizer
from piper.errors import ConfigError, file_errors


class Windows(Batches):
    """Windows of `length` tokens, each labelled with the tokens that follow; they do not overlap."""

    def __init__(
        self, tokens: NDArray[np.integer], length: int, batch: int, seed: int, shuffle: bool, by: str
    ) -> None:
        if length < 1:
            raise ConfigError(f"length={length}", by=by, hint="choose a window of at least 1 token")
        if len(tokens) <= length:
            raise ConfigError(
                "the data is too short for one window",
                by=by,
                facts={"length": f"{length} tokens and the one after", "data": f"{len(tokens)} tokens"},
                hint="choose a shorter window, or give more data",
            )
        super().__init__((len(tokens) - 1) // length, batch, seed, shuffle)
        self.tokens, self.length = tokens, length

    def collect(self, samples: Places) -> Batch:
        """Return these windows as one batch."""
        starts = (int(index) * self.length for index in samples)
        rows = [np.asarray(self.tokens[start : start + self.length + 1], dtype=np.int64) for start in starts]
        windows = torch.from_numpy(np.stack(rows))
        return {"tokens": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


class TokenFile(Windows):
    """Batches of a NumPy token file, plain integers one after another: mapped, never read as a whole."""

    def __init__(
        self,
        path: Path | str,
        length: int,
        batch: int,
        seed: int = 0,
        dtype: str = DTYPE,
        shuffle: bool = True,
    ) -> None:
        super().__init__(mapped(Path(path), dtype), length, batch, seed, shuffle, by=str(path))


class TextFile(Windows):
    """Batches of a text file, held in memory as tokens: bytes, unless a tokenizer is given."""

    def __init__(
        self,
        path: Path | str,
        length: int,
        batch: int,
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
        shuffle: bool = True,
    ) -> None:
        with file_errors("the text cannot be read", path, "give the path of a UTF-8 text"):
            text = Path(path).read_text(encoding="utf-8")
        tokens = (tokenizer or ByteTokenizer()).encode(text)
        super().__init__(tokens, length, batch, seed, shuffle, by=str(path))


def mapped(path: Path, dtype: str) -> NDArray[np.integer]:
    """Map a token file as an array, of which only the parts that are read are loaded."""
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype("V0")
    if kind.kind not in "iu":
        raise ConfigError(
            f"dtype={dtype!r} is not a type of tokens",
            by=str(path),
            hint="name the integers that the file was written with: 'uint16', 'int32', ...",
        )
    hint = "write one with piper.data.write_tokens, or fix the path"
    with file_errors("the token file cannot be read", path, hint):
        size = path.stat().st_size
    if size % kind.itemsize or not size:
        raise ConfigError(
            "the token file does not hold whole tokens",
            by=str(path),
            facts={"size": f"{size} bytes", "dtype": f"{kind}, {kind.itemsize} bytes each"},
            hint="name the dtype that the file was written with",
        )
    return np.memmap(path, dtype=kind, mode="r")
