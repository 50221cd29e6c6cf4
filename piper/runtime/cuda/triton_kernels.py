"""Says where kernels that are written in Triton can run: modules that hold one import Triton."""

from importlib.util import find_spec

import torch


def runs_triton(device: torch.device) -> bool:
    """Return whether a device is one that Triton writes code for, and Triton is installed."""
    return device.type == "cuda" and find_spec("triton") is not None
