"""Names the line of a model or loss that is running."""

import sys
from pathlib import Path
from types import FrameType

import torch

PACKAGE = Path(__file__).parents[1]
OURS = (str(Path(torch.__file__).parent), str(PACKAGE / "check"), str(PACKAGE / "runtime"))


def model_line() -> str:
    """Return `file.py:12` of the innermost frame that is neither of torch, nor of the runtime or check."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(OURS) and "contextlib" not in name:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
