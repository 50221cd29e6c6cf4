"""What a driver notes in memory that outlives it, so that another driver can take its place.

The supervisor holds the memory open. A note is complete or absent: it goes into one of two files in turn, and
its number is written last.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from piper.checkpoint.json_state import Plain, decode, encode
from piper.checkpoint.metadata import Trainer
from piper.errors import ConfigError
from piper.launchers.base import StepResult
from piper.launchers.transport.nameless_files import nameless_file
from piper.launchers.transport.serialize import Codec
from piper.recovery.elastic import ElasticLayout, ElasticRun
from piper.recovery.recovering_run import RecoveringRun

HEAD = struct.Struct("=qq")  # the number of the note, or 0 while it is written, and its bytes
FILES = 2
KEPT = 3  # steps whose results are noted
States = dict[str, dict[str, object]]  # of callbacks, by their names


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What stays as it was when the first driver began."""

    done: int  # steps before the run
    path: str | None  # the checkpoint that it began from. None: it began with the first step
    trainer: Trainer | None  # of the checkpoint that it began from
    unread: Mapping[str, Tensor]  # values that no device holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a driver knows between two steps."""

    done: int
    ended: bool  # that was the last step
    left: int  # retries
    results: Mapping[int, StepResult]  # of the last steps
    options: Mapping[int, list[tuple[int, str, float]]]  # of the optimizer, that were set, by step
    layout: ElasticLayout | None  # of an elastic run
    saving: tuple[int, str, int | None] | None  # the step, the path and the `keep` of a save under way
    states: object  # encoded: positions of the data and states of callbacks by step, the data of the save


CODEC = Codec((Beginning, Progress))


class Note:
    """A value in two files without a name. One stays complete while the other is written."""

    def __init__(self) -> None:
        self.files = [nameless_file(HEAD.size) for _ in range(FILES)]

    def write(self, value: Beginning | Progress) -> None:
        """Write a value over the one before the last."""
        number = max(map(number_in, self.files)) + 1
        file, data = self.files[number % FILES], CODEC.encode(value)
        os.pwrite(file, HEAD.pack(0, len(data)), 0)
        os.pwrite(file, data, HEAD.size)
        os.pwrite(file, HEAD.pack(number, len(data)), 0)

    def read(self) -> object:
        """Return the last value that is complete. None: there is none."""
        file = max(self.files, key=number_in)
        number, length = HEAD.unpack(os.pread(file, HEAD.size, 0))
        return CODEC.decode(os.pread(file, length, HEAD.size)) if number else None

    def close(self) -> None:
        """Give the memory back."""
        for file in self.files:
            os.close(file)


def number_in(file: int) -> int:
    """Return the number of the note in a file. 0: none is complete."""
    return int(HEAD.unpack(os.pread(file, HEAD.size, 0))[0])


class Journal:
    """The notes of a run's drivers."""

    def __init__(self) -> None:
        self.first, self.last = Note(), Note()

    def begin(self, run: RecoveringRun, trainer: Trainer | None) -> None:
        """Note how the run begins."""
        path = None if run.begun[0] is None else str(run.begun[0])
        self.first.write(Beginning(done=run.done, path=path, trainer=trainer, unread=run.unread))

    def commit(self, run: RecoveringRun, positions: Mapping[int, object], *, ended: bool) -> None:
        """Note that a step is complete: reported, evaluated, and saved where it is due."""
        saving = run.saving
        states = (dict(positions), dict(run.completed), None if saving is None else saving.data)
        try:
            encoded = encode(states, "state")
        except ConfigError:
            return  # a state of the user's own, which a checkpoint cannot hold either
        layout = run.layout() if isinstance(run, ElasticRun) else None
        self.last.write(
            Progress(
                done=run.done,
                ended=ended,
                left=run.left,
                results={step: run.results[step] for step in [*run.results][-KEPT:]},
                options=run.set_after,
                layout=layout,
                saving=None if saving is None else (saving.step, str(saving.path), saving.keep),
                states=encoded,
            )
        )
        if isinstance(run, ElasticRun) and layout is not None:
            run.noted(layout)

    def beginning(self) -> Beginning:
        """Return how the run began."""
        found = self.first.read()
        assert isinstance(found, Beginning), "it is noted before the first step"
        return found

    def progress(self) -> Progress | None:
        """Return how far the run has come. None: no step is complete."""
        found = self.last.read()
        assert found is None or isinstance(found, Progress)
        return found

    def close(self) -> None:
        """Give the memory back."""
        self.first.close()
        self.last.close()


def states_of(progress: Progress) -> tuple[dict[int, object], dict[int, States], object]:
    """Return the positions of the data and the states of callbacks by step, and the data of a save."""
    found = decode(cast(Plain, progress.states))
    return cast("tuple[dict[int, object], dict[int, States], object]", found)
