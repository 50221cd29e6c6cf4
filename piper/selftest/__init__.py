"""Tries a machine before it is trusted: links, collectives, compositions, recovery, and torch beside it."""
