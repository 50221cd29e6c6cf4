"""The proof of values: which value each instruction reads, and that each sum holds each contribution once."""
