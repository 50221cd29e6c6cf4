"""A worker's side of checkpoints: it writes a copy of its state, or reads one, while steps go on."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from piper.checkpoint.load import read_state
from piper.checkpoint.metadata import read_record
from piper.checkpoint.save import Copied, RefusedError, copy_state
from piper.checkpoint.storage import CheckpointReader, Written, write_parts
from piper.checkpoint.verified_files import StorageError
from piper.errors import ConfigError
from piper.runtime.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The outcome of a save or load: done, refused, or failed because of the files."""

    trouble: str | None = None
    refused: RefusedError | None = None
    written: Written = field(default_factory=lambda: Written(files={}))
    copied: Copied | None = None  # without its tensors


class BackgroundSaver:
    """Saves and loads one worker's state in a thread, while the worker may go on."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.thread: threading.Thread | None = None
        self.done: Done | None = None
        self.adoptions: list[Callable[[], object]] = []  # what a load has read for the worker

    def save(self, folder: str) -> None:
        """Copy the state, and begin to write the copy down."""
        try:
            copied = copy_state(self.worker)
        except RefusedError as error:
            self.done = Done(refused=error)
        except ConfigError as error:
            self.done = Done(trouble=str(error))
        else:
            self._begin("save", copied, folder)

    def load(self, folder: str) -> None:
        """Begin to read the state that a checkpoint holds. The worker keeps its own until `adopt`."""
        self._begin("load", None, folder)

    def adopt(self, wanted: bool) -> None:
        """Give the worker the state that was read; if it is not wanted, forget it."""
        adoptions, self.adoptions = self.adoptions, []
        for act in adoptions if wanted else ():
            act()

    def _begin(self, what: Literal["save", "load"], copied: Copied | None, folder: str) -> None:
        assert self.thread is None, "one at a time"
        self.done = None

        def work() -> None:
            try:
                if copied is None:
                    reader = CheckpointReader(Path(folder), read_record(Path(folder)))
                    self.adoptions = read_state(self.worker, reader)
                    self.done = Done()
                else:
                    written = write_parts(Path(folder), f"device-{self.worker.device:05}", copied.parts)
                    self.done = Done(written=written, copied=replace(copied, parts=[]))
            except RefusedError as error:
                self.done = Done(refused=error)
            except StorageError as error:
                self.done = Done(trouble=str(error))
            except Exception as error:  # noqa: BLE001  it is reported to the driver, which raises
                self.done = Done(trouble=f"{type(error).__name__}: {error}")

        self.thread = threading.Thread(target=work, name=f"{what} {self.worker.device}", daemon=True)
        self.thread.start()

    def poll(self, wait: float) -> Done | None:
        """Return the outcome of the save or load. None: it has not ended within `wait` seconds."""
        if self.thread is not None:
            self.thread.join(wait)
            if self.thread.is_alive():
                return None
            self.thread = None
        assert self.done is not None
        return self.done
