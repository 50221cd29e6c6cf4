"""Data whose order is decided by seed and step alone, so that it survives a resume and a change of layout."""

from piper.data.batches import Batches
from piper.data.documents import balance_documents
from piper.data.samples import Samples, Stream
from piper.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, write_tokens
from piper.data.tokens import TextFile, TokenFile

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
