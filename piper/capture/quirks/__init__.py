"""Workarounds, one in each file, with the version of a library that needs it, and the one that will not."""
