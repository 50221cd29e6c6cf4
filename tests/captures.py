"""Captures of equal models are made once in a run of the tests, as `compile(job, captured=program)` shares them.

Two jobs have equal captures if their models and losses are equal functions with equal captured values and globals,
for the same fields, precision and device. Functions of the repository and of installed packages are known by their names,
those of files that a test wrote by their code. A test that needs a capture of its own asks for the fixture `own_captures`.
"""

import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pickletools import genops
from types import ModuleType
from unittest.mock import patch

import cloudpickle
import torch

from piper.capture.recordings import Recordings, fields_of
from piper.capture.trace.record import LossFn
from piper.compiler import build
from piper.job import Batch, Job

KEPT = 60  # models; those that only one job used are dropped first, then what was not used for longest
# An environment may also find packages in the folder of another one, by a .pth file.
PACKAGES = (sysconfig.get_path("purelib"), Path(torch.__file__).parents[1])
NAMED = tuple(str(path) for path in (Path(__file__).parents[1], *PACKAGES, sysconfig.get_path("stdlib")))
ALWAYS_NAMED: set[str] = set()  # modules that were found to be; there are thousands
new_recordings = build.new_recordings


class SharedCaptures:
    """Keeps the recordings of models."""

    def __init__(self) -> None:
        self.known: OrderedDict[Hashable, Recordings] = OrderedDict()
        self.reused: set[Hashable] = set()  # of those: what several jobs have used

    def recordings(
        self,
        job: Job,
        kind: str,
        batch: Batch,
        loss: LossFn,
        *,
        compiled: bool,
        forward_only: bool = False,
    ) -> Recordings:
        """Return the recordings of a job's model, as `new_recordings` makes them, or those of an equal model."""
        fresh = new_recordings(job, kind, batch, loss, compiled=compiled, forward_only=forward_only)
        code = None if compiled else code_of(job.model, loss)
        if code is None:
            return fresh
        fields = tuple(fields_of(batch).items())
        key = (code, job.precision, kind, fields, forward_only, torch.get_default_dtype())
        if key in self.known:
            self.reused.add(key)
        shared = self.known.setdefault(key, fresh)
        self.known.move_to_end(key)
        if len(self.known) > KEPT:
            older = [*self.known][:-1]
            dropped = next((each for each in older if each not in self.reused), older[0])
            self.reused.discard(dropped)
            del self.known[dropped]
        return shared


def code_of(*functions: object) -> bytes | None:
    """Return the same bytes for equal functions, also of a file that was imported again. None: nobody can say."""
    with written_out():
        try:
            return canonical(cloudpickle.dumps(functions))
        except Exception:  # noqa: BLE001  whatever a value of the user's raises, its job is captured by itself
            return None


def canonical(pickled: bytes) -> bytes:
    """Return the same for pickles of equal values: which equal texts are one object depends on who made them."""
    said: list[object] = []
    memo: list[object] = []
    objects = 0
    for operation, argument, _ in genops(pickled):
        match operation.name:
            case "FRAME":
                pass
            case "MEMOIZE" if isinstance(said[-1], str | bytes):
                memo.append(said[-1])
            case "MEMOIZE":
                memo.append(("object", objects))
                objects += 1
            case "BINGET" | "LONG_BINGET":
                assert isinstance(argument, int)
                said.append(memo[argument])
            case _:
                said.append(argument if isinstance(argument, str | bytes) else (operation.name, argument))
    return repr(said).encode()


@contextmanager
def written_out() -> Iterator[None]:
    """Write the code of functions whose files may change, and no number of a class object."""
    unknown = [(name, module) for name, module in sys.modules.items() if name not in ALWAYS_NAMED]
    ALWAYS_NAMED.update(name for name, module in unknown if is_named(module))
    changeable = {module.__name__: module for name, module in unknown if name not in ALWAYS_NAMED}
    for module in changeable.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        with patch.object(cloudpickle.cloudpickle, "_get_or_create_tracker_id", lambda owner: owner.__name__):
            yield
    finally:
        for module in changeable.values():
            cloudpickle.unregister_pickle_by_value(module)


def is_named(module: object) -> bool:
    """Return whether a module is always the same in a run of the tests."""
    if not isinstance(module, ModuleType) or module.__name__ not in sys.modules:
        return True
    file = getattr(module, "__file__", None)
    spec = getattr(module, "__spec__", None)
    return spec is not None if file is None else file.startswith(NAMED)


@cache  # a test that runs pytest in this process calls it again, and must not drop what is shared
def share_captures() -> None:
    """Let all compilations of this process share captures, until it ends."""
    patch.object(build, "new_recordings", SharedCaptures().recordings).start()
