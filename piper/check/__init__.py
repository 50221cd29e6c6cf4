"""The engine of `piper check`: the plain model on one device, and where a run first differs from it."""
