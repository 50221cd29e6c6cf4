"""Piper: a model, a few annotations and a short strategy become a proven distributed training program.

Importing this is cheap: every name is imported from its module on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from piper.version import VERSION

if TYPE_CHECKING:
    from piper import callbacks as callbacks
    from piper import checkpoint as checkpoint
    from piper import data as data
    from piper import losses as losses
    from piper import schedules as schedules
    from piper import strategies as strategies
    from piper.capture.shard.rules import sharding_rule as sharding_rule
    from piper.capture.trace.annotate import annotate as annotate
    from piper.capture.trace.annotate import annotate_layers as annotate_layers
    from piper.capture.trace.annotate import annotate_modules as annotate_modules
    from piper.checkpoint.huggingface import export_hf as export_hf
    from piper.checkpoint.huggingface import import_hf as import_hf
    from piper.compiler import compile as compile
    from piper.directives import *  # noqa: F403  whose `__all__` is what users write
    from piper.errors import CaptureError as CaptureError
    from piper.errors import ConfigError as ConfigError
    from piper.errors import LaunchError as LaunchError
    from piper.errors import PiperError as PiperError
    from piper.errors import ScheduleError as ScheduleError
    from piper.errors import WorkerError as WorkerError
    from piper.experts import grouped_mm as grouped_mm
    from piper.experts import route as route
    from piper.experts import unroute as unroute
    from piper.ir.select import at as at
    from piper.job import Buckets as Buckets
    from piper.job import Checkpoint as Checkpoint
    from piper.job import Evaluate as Evaluate
    from piper.job import Job as Job
    from piper.models.huggingface import tensor_plan as tensor_plan
    from piper.run.launch import launch as launch
    from piper.run.run import Run as Run
    from piper.tuning.tune import tune as tune

_MODULES = ("callbacks", "checkpoint", "data", "losses", "schedules", "strategies")
_INNER = ("directives", "errors", "ir", "job")  # modules that are there without an import of their own
_NAMES = {  # by the module that has them, without "piper."; the names of directives are in `piper.directives`
    "capture.shard.rules": ("sharding_rule",),
    "capture.trace.annotate": ("annotate", "annotate_layers", "annotate_modules"),
    "checkpoint.huggingface": ("export_hf", "import_hf"),
    "compiler": ("compile",),
    "errors": ("CaptureError", "ConfigError", "LaunchError", "PiperError", "ScheduleError", "WorkerError"),
    "experts": ("grouped_mm", "route", "unroute"),
    "ir.select": ("at",),
    "job": ("Buckets", "Checkpoint", "Evaluate", "Job"),
    "models.huggingface": ("tensor_plan",),
    "run.launch": ("launch",),
    "run.run": ("Run",),
    "tuning.tune": ("tune",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__version__ = VERSION


def __getattr__(name: str) -> object:
    if name in (*_MODULES, *_INNER):
        return import_module(f"piper.{name}")
    if name in _MODULE_OF:
        return getattr(import_module(f"piper.{_MODULE_OF[name]}"), name)
    if name == "__all__":
        return __dir__()
    if not name.startswith("__") and name in (directives := import_module("piper.directives")).__all__:
        return getattr(directives, name)
    raise AttributeError(f"module 'piper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*_MODULES, *_MODULE_OF, *import_module("piper.directives").__all__))
