"""The runtime on CUDA devices: streams, and when memory that crossed them goes back."""
