"""Other timeouts for a test."""

from dataclasses import replace
from importlib import import_module

import pytest

from piper.workers.timeouts import Timeouts


def set_timeouts(monkeypatch: pytest.MonkeyPatch, module: str, **seconds: float) -> None:
    """Let a module of the workers wait for so many seconds, by the names of `Timeouts`."""
    path = f"piper.workers.{module}"
    known = vars(import_module(path))["TIMEOUTS"]
    assert isinstance(known, Timeouts)
    monkeypatch.setattr(f"{path}.TIMEOUTS", replace(known, **seconds))  # type: ignore[arg-type]
