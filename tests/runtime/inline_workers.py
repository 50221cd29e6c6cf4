"""The workers of a run whose devices are threads of this process."""

from piper.run.run import Run
from piper.runtime.worker import Worker
from piper.workers.inline import InlineWorkerGroup


def inline_group(run: Run) -> InlineWorkerGroup:
    """Return the workers of an inline run, with what they share."""
    group = run.session.group
    assert isinstance(group, InlineWorkerGroup)
    return group


def workers_of(run: Run) -> dict[int, Worker]:
    """Return the workers of an inline run by device."""
    return inline_group(run).workers
