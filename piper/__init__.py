"""Piper: a model, a few annotations and a short strategy become a proven distributed training program.

Importing this is cheap: what needs torch, or few scripts use, is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from piper.directives import *  # noqa: F403  whose `__all__` is what users write
from piper.directives.base import known_directives
from piper.errors import CaptureError as CaptureError
from piper.errors import ConfigError as ConfigError
from piper.errors import LaunchError as LaunchError
from piper.errors import PiperError as PiperError
from piper.errors import ScheduleError as ScheduleError
from piper.errors import WorkerError as WorkerError
from piper.ir.select import at as at
from piper.job import Buckets as Buckets
from piper.job import Checkpoint as Checkpoint
from piper.job import Evaluate as Evaluate
from piper.job import Job as Job
from piper.version import VERSION

if TYPE_CHECKING:
    from piper import callbacks as callbacks
    from piper import checkpoint as checkpoint
    from piper import data as data
    from piper import losses as losses
    from piper import schedules as schedules
    from piper import strategies as strategies
    from piper.capture.layers.annotate_layers import annotate_layers as annotate_layers
    from piper.capture.shard.rules import sharding_rule as sharding_rule
    from piper.capture.trace.annotate import annotate as annotate
    from piper.capture.trace.annotate import annotate_modules as annotate_modules
    from piper.checkpoint.huggingface import export_hf as export_hf
    from piper.checkpoint.huggingface import import_hf as import_hf
    from piper.compiler import compile as compile
    from piper.experts import grouped_mm as grouped_mm
    from piper.experts import route as route
    from piper.experts import unroute as unroute
    from piper.models.huggingface import tensor_plan as tensor_plan
    from piper.run.launch import launch as launch
    from piper.run.run import Run as Run
    from piper.tuning.tune import tune as tune

NEEDS_TORCH = {
    "annotate": "piper.capture.trace.annotate",
    "annotate_layers": "piper.capture.layers.annotate_layers",
    "annotate_modules": "piper.capture.trace.annotate",
    "compile": "piper.compiler",
    "export_hf": "piper.checkpoint.huggingface",
    "import_hf": "piper.checkpoint.huggingface",
    "Run": "piper.run.run",
    "grouped_mm": "piper.experts",
    "launch": "piper.run.launch",
    "route": "piper.experts",
    "sharding_rule": "piper.capture.shard.rules",
    "tensor_plan": "piper.models.huggingface",
    "tune": "piper.tuning.tune",
    "unroute": "piper.experts",
}

__version__ = VERSION
_ERRORS = ("CaptureError", "ConfigError", "LaunchError", "PiperError", "ScheduleError", "WorkerError")
_MODULES = ("callbacks", "checkpoint", "data", "losses", "schedules", "strategies")
_OTHERS = (
    *_MODULES,
    "Buckets",
    "Checkpoint",
    "Directive",
    "Evaluate",
    "Job",
    "at",
)
__all__ = sorted((*_ERRORS, *_OTHERS, *NEEDS_TORCH, *known_directives()))


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"piper.{name}")
    if name in NEEDS_TORCH:
        return getattr(import_module(NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'piper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
