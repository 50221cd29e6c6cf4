"""The recovery behind a run, whose parts tests look at."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from piper.run.elastic import ElasticRecovery
from piper.run.recovery import Recovery
from piper.run.run import Run
from piper.run.run_events import Disk
from piper.workers.results import Batch, Resumed


def recovery_of(run: Run) -> Recovery:
    """Return the sessions of a run that recovers."""
    assert isinstance(run.sessions, Recovery)
    return run.sessions


def elastic_of(run: Run) -> ElasticRecovery:
    """Return the sessions of a run whose number of devices can change."""
    assert isinstance(run.sessions, ElasticRecovery)
    return run.sessions


def disk_with(
    folder: Path, past: Callable[[int], Sequence[Path]], batches: Callable[[Resumed], Iterator[Batch]]
) -> Disk:
    """Return the checkpoints of a run as a test has them."""
    return cast(Disk, SimpleNamespace(folder=folder, past=past, batches=batches))
