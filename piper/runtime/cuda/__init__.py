"""The runtime on CUDA devices: streams, when memory that crossed them goes back, and steps as one graph."""
