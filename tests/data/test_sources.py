"""Token files, texts, tokenizers and datasets; each error in full."""

import sys
from collections.abc import Callable
from inspect import cleandoc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from piper.data import ByteTokenizer, FileTokenizer, Samples, Stream, TextFile, TokenFile, write_tokens
from piper.data.feed import Feed
from piper.errors import ConfigError


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.bin"
    np.arange(101, dtype=np.uint16).tofile(path)
    return path


def test_a_token_file_gives_windows_and_what_follows(tokens: Path) -> None:
    data = TokenFile(tokens, length=10, batch=2, shuffle=False)
    assert isinstance(data.tokens, np.memmap) and data.samples == 10
    batch = data.at(1)
    assert batch["tokens"].dtype == torch.int64
    assert batch["tokens"].tolist() == [[*range(20, 30)], [*range(30, 40)]]
    assert batch["labels"].tolist() == [[*range(21, 31)], [*range(31, 41)]]


def test_every_label_of_an_epoch_comes_once(tokens: Path) -> None:
    data = TokenFile(tokens, length=10, batch=5, seed=1)
    seen = torch.cat([batch["labels"].flatten() for batch in islice(data, 2)])
    assert sorted(seen.tolist()) == [*range(1, 101)]


def test_a_text_as_bytes_and_back(tmp_path: Path) -> None:
    text = "Zwölf Boote, 12 €.\n"
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert tokenizer.decode([0xE2, 0x82]) == "�"
    path = tmp_path / "tokens.bin"
    assert write_tokens(tokenizer, text, path) == len(text.encode())
    assert np.fromfile(path, dtype=np.uint16).tolist() == list(text.encode())
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.bin"]


def test_a_type_that_just_holds_every_token(tmp_path: Path) -> None:
    """256 tokens are the numbers up to 255."""
    assert write_tokens(ByteTokenizer(), "abc\u00ff", tmp_path / "narrow.bin", dtype="uint8") == 5
    assert (tmp_path / "narrow.bin").read_bytes() == b"abc\xc3\xbf"


def test_a_text_file_equals_its_token_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the tide comes in and the tide goes out " * 10, encoding="utf-8")
    write_tokens(ByteTokenizer(), text.read_text(encoding="utf-8"), tmp_path / "tokens.bin")
    ours, theirs = TextFile(text, 16, 4, seed=2), TokenFile(tmp_path / "tokens.bin", 16, 4, seed=2)
    for step in range(10):
        assert torch.equal(ours.at(step)["labels"], theirs.at(step)["labels"])


def test_a_tokenizers_file(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    made = library.Tokenizer(library.models.WordLevel({"tide": 0, "out": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.vocab == 3
    assert tokenizer.encode("out tide in").tolist() == [1, 0, 2]
    assert tokenizer.decode([1, 0]) == "out tide"


def test_lists_become_tensors_as_hugging_face_gives_them() -> None:
    rows = [{"tokens": [i, i + 1], "weight": 0.5} for i in range(6)]
    batch = Samples(rows, 3, shuffle=False).at(1)
    assert batch["tokens"].tolist() == [[3, 4], [4, 5], [5, 6]]
    assert batch["weight"].shape == (3,)


def test_hugging_face_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"tokens": [[i, i + 1] for i in range(6)], "label": [*range(6)]}
    whole = datasets.Dataset.from_dict(rows)
    batch = Samples(whole, 3, shuffle=False).at(1)
    assert batch["tokens"].tolist() == [[3, 4], [4, 5], [5, 6]] and batch["label"].tolist() == [3, 4, 5]
    seen = [batch["label"].tolist() for batch in islice(Samples(whole, 3, seed=1), 2)]
    assert sorted(seen[0] + seen[1]) == [*range(6)]
    streamed = [batch["label"].tolist() for batch in islice(Stream(whole.to_iterable_dataset(), 4), 3)]
    assert streamed == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


def spent() -> Feed:
    batches = iter([{"x": torch.zeros(1)}])
    return Feed(lambda: batches, seed=0)


def read(data: object, steps: int = 1) -> list[Tensor]:
    return [*islice(data, steps)]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda folder: TokenFile(folder / "none.bin", 4, 1),
            """
            {folder}/none.bin: the token file cannot be read
              why:  No such file or directory
              hint: write one with piper.data.write_tokens, or fix the path
            """,
        ),
        (
            lambda folder: TokenFile(folder / "three.bin", 4, 1),
            """
            {folder}/three.bin: the token file does not hold whole tokens
              size:  3 bytes
              dtype: uint16, 2 bytes each
              hint:  name the dtype that the file was written with
            """,
        ),
        (
            lambda folder: TokenFile(folder / "three.bin", 4, 1, dtype="uint8"),
            """
            {folder}/three.bin: the data is too short for one window
              length: 4 tokens and the one after
              data:   3 tokens
              hint:   choose a shorter window, or give more data
            """,
        ),
        (
            lambda folder: TokenFile(folder / "three.bin", 4, 1, dtype="float32"),
            """
            {folder}/three.bin: dtype='float32' is not a type of tokens
              hint: name the integers that the file was written with: 'uint16', 'int32', ...
            """,
        ),
        (
            lambda folder: TokenFile(folder / "three.bin", 4, 1, dtype="tokens"),
            """
            {folder}/three.bin: dtype='tokens' is not a type of tokens
              hint: name the integers that the file was written with: 'uint16', 'int32', ...
            """,
        ),
        (
            lambda folder: TokenFile(folder / "three.bin", 0, 1, dtype="uint8"),
            """
            {folder}/three.bin: length=0
              hint: choose a window of at least 1 token
            """,
        ),
        (
            lambda folder: TokenFile(folder / "three.bin", 1, 3, dtype="uint8"),
            """
            TokenFile: the batch does not fit the data
              batch: 3 samples
              data:  2 samples
              hint:  choose a batch from 1 to 2
            """,
        ),
        (
            lambda folder: TokenFile(folder / "three.bin", 1, 1, seed=-1, dtype="uint8"),
            """
            TokenFile: seed=-1
              hint: choose a seed from 0
            """,
        ),
        (
            lambda folder: TextFile(folder / "none.txt", 4, 1),
            """
            {folder}/none.txt: the text cannot be read
              why:  No such file or directory
              hint: give the path of a UTF-8 text
            """,
        ),
        (
            lambda folder: write_tokens(ByteTokenizer(), "x", folder / "none" / "x.bin"),
            """
            {folder}/none/x.bin: the tokens cannot be written
              why:  No such file or directory: {part}
              hint: name a file in a folder you own
            """,
        ),
        (
            lambda folder: write_tokens(ByteTokenizer(), "x", folder / "x.bin", dtype="int8"),
            """
            {folder}/x.bin: the file's type cannot hold every token
              dtype:      int8, at most 127
              vocabulary: 256 tokens
              hint:       write with a wider type, and read with the same: dtype='uint32'
            """,
        ),
        (
            lambda folder: FileTokenizer(folder / "none.json"),
            """
            {folder}/none.json: there is no such file
              hint: give the path of a tokenizer.json
            """,
        ),
        (
            lambda folder: Samples(iter([]), 1),  # type: ignore[arg-type]
            """
            Samples: list_iterator does not give samples by number
              hint: give something with len() and [i], or use Stream for what can only be iterated
            """,
        ),
        (
            lambda folder: Samples([], 1),
            """
            Samples: the batch does not fit the data
              batch: 1 samples
              data:  0 samples
              hint:  give data that is not empty
            """,
        ),
        (
            lambda folder: read(Samples([3], 1)),  # type: ignore[list-item]
            """
            Samples: a sample is int, not a dict
              hint: give samples such as {{"tokens": ..., "labels": ...}}
            """,
        ),
        (
            lambda folder: read(Samples([{"x": [0]}, {"x": [0, 1]}], 2, shuffle=False)),
            """
            Samples: the samples' field 'x' does not make a tensor
              why:  stack expects each tensor to be equal size, but got [1] at entry 0 and [2] at entry 1
              hint: keep fields of numbers only, of one length: leave out texts, cut or pad the rest
            """,
        ),
        (
            lambda folder: read(Stream([{"x": "text"}], 1)),
            """
            Stream: the samples' field 'x' does not make a tensor
              why:  new(): invalid data type 'str'
              hint: keep fields of numbers only, of one length: leave out texts, cut or pad the rest
            """,
        ),
        (
            lambda folder: Stream([], 0),
            """
            Stream: batch=0
              hint: choose a batch of at least 1 sample
            """,
        ),
        (
            lambda folder: read(Stream([], 1)),
            """
            Stream: the dataset gives no sample
              dataset: list
              hint:    give a dataset that is not empty and can be iterated again, not a generator
            """,
        ),
        (
            lambda folder: read(spent(), 2),
            """
            data (test_sources.py:99): data() ended after 1 batches
              epoch: 1, and it holds no batch
              hint:  let data() make new batches each time it is called, or train fewer steps
            """,
        ),
    ],
)
def test_what_cannot_be_read_is_refused(use: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    (tmp_path / "three.bin").write_bytes(b"abc")
    with pytest.raises(ConfigError) as error:
        use(tmp_path)
    part = str(error.value).partition("directory: ")[2].partition("\n")[0]
    assert str(error.value) == cleandoc(message).format(folder=tmp_path, part=part)


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        FileTokenizer(tmp_path / "bad.json")
    lines = str(error.value).splitlines()
    assert lines[0] == f"{tmp_path}/bad.json: this is not a tokenizer"
    assert lines[-1] == "  hint: give a tokenizer.json, as `tokenizer.save(path)` writes it"


def test_without_the_tokenizers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError) as error:
        FileTokenizer("tokenizer.json")
    assert str(error.value) == cleandoc("""
        tokenizer.json: the tokenizers library is not installed
          why:  import of tokenizers halted; None in sys.modules
          hint: pip install tokenizers, or use ByteTokenizer
    """)
