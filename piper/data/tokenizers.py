"""Tokenizers: bytes, which need no vocabulary, or a file of the `tokenizers` library."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from piper.errors import ConfigError, file_errors
from piper.process.files import not_replaced

DTYPE = "uint16"  # of a token file, unless it says otherwise


class Tokenizer(Protocol):
    """A tokenizer: turns text into tokens and back. vocab: the number of distinct tokens."""

    @property
    def vocab(self) -> int: ...
    def encode(self, text: str) -> NDArray[np.int64]: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


class ByteTokenizer:
    """Every byte of the text's UTF-8 is a token."""

    vocab = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of bytes. Invalid UTF-8, such as half a character, becomes a replacement mark."""
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library."""

    def __init__(self, path: Path | str) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise ConfigError(
                "the tokenizers library is not installed",
                by=str(path),
                facts={"why": str(error)},
                hint="pip install tokenizers, or use ByteTokenizer",
            ) from None
        if not Path(path).is_file():
            raise ConfigError("there is no such file", by=str(path), hint="give the path of a tokenizer.json")
        try:
            self._loaded = Loaded.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                "this is not a tokenizer",
                by=str(path),
                facts={"why": str(error)},
                hint="give a tokenizer.json, as `tokenizer.save(path)` writes it",
            ) from error

    @property
    def vocab(self) -> int:
        return int(self._loaded.get_vocab_size())

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.asarray(self._loaded.encode(text).ids, dtype=np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._loaded.decode([*tokens]))


def write_tokens(tokenizer: Tokenizer, text: str, path: Path | str, dtype: str = DTYPE) -> int:
    """Write a text as a token file and return its number of tokens. A reader never sees half a file."""
    most = np.iinfo(dtype).max
    if tokenizer.vocab - 1 > most:
        raise ConfigError(
            "the file's type cannot hold every token",
            by=str(path),
            facts={"dtype": f"{dtype}, at most {most}", "vocabulary": f"{tokenizer.vocab} tokens"},
            hint="write with a wider type, and read with the same: dtype='uint32'",
        )
    tokens = tokenizer.encode(text).astype(dtype)
    part, target = Path(f"{path}.{os.getpid()}.part"), Path(path)
    with file_errors("the tokens cannot be written", path, "name a file in a folder you own"):
        if target.is_file() and target.stat().st_size:
            if target.read_bytes() != tokens.tobytes():  # a file of numbers does not say who wrote it
                raise not_replaced(target)
            return len(tokens)
        try:
            tokens.tofile(part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return len(tokens)
