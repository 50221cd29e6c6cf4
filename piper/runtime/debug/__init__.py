"""Checks, measures and records steps, next to the executor."""
