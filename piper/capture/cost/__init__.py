"""Estimates what a phase computes, moves and holds."""
