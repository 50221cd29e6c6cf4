"""The runtime on CUDA devices: streams, the release of memory that crosses them, and steps as one graph."""
