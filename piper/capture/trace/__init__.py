"""Traces a model and its loss, and cuts the trace into chunks."""
