"""The recovery behind a run, whose parts tests look at."""

from piper.run.elastic import ElasticRecovery
from piper.run.recovery import Recovery
from piper.run.run import Run


def recovery_of(run: Run) -> Recovery:
    """Return the sessions of a run that recovers."""
    assert isinstance(run.sessions, Recovery)
    return run.sessions


def elastic_of(run: Run) -> ElasticRecovery:
    """Return the sessions of a run whose number of devices can change."""
    assert isinstance(run.sessions, ElasticRecovery)
    return run.sessions
