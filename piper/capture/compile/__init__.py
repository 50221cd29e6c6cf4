"""Compiles the phases of chunks, and caches compiled code."""
