"""Searches for a strategy: candidates, proven bounds, evaluation by compiling and simulating, results."""
