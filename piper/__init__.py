"""Piper: a model, a few annotations and a short strategy become a proven distributed training program.

Importing this is cheap. What needs torch is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from piper import schedules
from piper.directives import Directive, order, place, remat, replicate, shard, split
from piper.errors import CaptureError, ConfigError, LaunchError, PiperError, ScheduleError, WorkerError
from piper.ir.select import at
from piper.job import Checkpoint, Job

if TYPE_CHECKING:
    from piper.api import compile
    from piper.capture.annotate import annotate, annotate_modules
    from piper.experts import grouped_mm, route, unroute
    from piper.launchers.base import Run
    from piper.launchers.launch import launch

__all__ = [
    "CaptureError",
    "Checkpoint",
    "ConfigError",
    "Directive",
    "Job",
    "LaunchError",
    "PiperError",
    "Run",
    "ScheduleError",
    "WorkerError",
    "annotate",
    "annotate_modules",
    "at",
    "compile",
    "grouped_mm",
    "launch",
    "order",
    "place",
    "remat",
    "replicate",
    "route",
    "schedules",
    "shard",
    "split",
    "unroute",
]

NEEDS_TORCH = {
    "annotate": "piper.capture.annotate",
    "annotate_modules": "piper.capture.annotate",
    "compile": "piper.api",
    "Run": "piper.launchers.base",
    "grouped_mm": "piper.experts",
    "launch": "piper.launchers.launch",
    "route": "piper.experts",
    "unroute": "piper.experts",
}


def __getattr__(name: str) -> object:
    if name in NEEDS_TORCH:
        return getattr(import_module(NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'piper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
