"""Data whose order is decided by seed and step alone, so that it survives a resume and a change of layout."""

from piper.data.batches import Batches, Samples, Stream, TextFile, TokenFile
from piper.data.documents import balance_documents
from piper.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, write_tokens

__all__ = [
    "Batches",
    "ByteTokenizer",
    "FileTokenizer",
    "Samples",
    "Stream",
    "TextFile",
    "TokenFile",
    "Tokenizer",
    "balance_documents",
    "write_tokens",
]
