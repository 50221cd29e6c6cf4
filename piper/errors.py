"""The errors a user can cause. Our own bugs are assertions instead."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Self


class PiperError(ValueError):
    """An error with one message: where, what, the facts that collide, and a way out."""

    def __init__(self, what: str, *, by: str, facts: Mapping[str, str] | None = None, hint: str) -> None:
        self.what, self.by, self.facts, self.hint = what, by, dict(facts or {}), hint
        rows = {**self.facts, "hint": hint}
        width = max(len(key) for key in rows) + 2
        below = "\n" + " " * (width + 2)  # a fact of several lines stays in its column
        shown = (f"  {key + ':':{width}}{text.replace(chr(10), below)}" for key, text in rows.items())
        super().__init__("\n".join([f"{by}: {what}", *shown]))

    def located(self, by: str, facts: Mapping[str, str] | None = None) -> Self:
        """Return the same error with a better place, and with more facts."""
        made = self.__class__.__new__(self.__class__)  # a class of ours may be made in another way
        PiperError.__init__(made, self.what, by=by, facts={**self.facts, **(facts or {})}, hint=self.hint)
        return made


class ScheduleError(PiperError):
    """A directive that cannot be applied, or a strategy that can never run."""

    def __init__(self, what: str, *, by: str = "", facts: Mapping[str, str] | None = None, hint: str) -> None:
        """Make the error. by: empty inside a directive, which `naming` adds."""
        super().__init__(what, by=by, facts=facts, hint=hint)


class CompilerError(PiperError):
    """Plans that fail their proof: a bug in Piper, which this strategy shows."""


class CaptureError(PiperError):
    """A model, loss or batch that cannot be captured."""


class LossError(CaptureError):
    """A loss that raised an exception while it was traced, or that cannot be traced."""


class ConfigError(PiperError):
    """A recipe, file or command line that is not what it should be."""


class LaunchError(PiperError):
    """Workers that could not be started."""


class WorkerError(PiperError):
    """A worker that failed, died or stalled: how (`kind`), which one, and where in its plan, if known."""

    kind: Literal["dead", "error", "stopped", "late"] | None = None
    device: int | None = None
    place: int | None = None  # the instruction


CONTENT = (ValueError, LookupError, TypeError, AttributeError)  # of a file that holds something else


@contextmanager
def file_errors(what: str, by: object, hint: str, *kinds: type[Exception]) -> Iterator[None]:
    """Report what goes wrong with a file inside the block as one message. kinds: errors of its content."""
    expected: tuple[type[Exception], ...] = (OSError, UnicodeDecodeError, *kinds)
    try:
        yield
    except PiperError:
        raise
    except expected as error:
        why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            other = error.filename is not None and str(error.filename) != str(by)
            why = f"{error.strerror}: {error.filename}" if other else error.strerror
        raise ConfigError(what, by=str(by), facts={"why": why}, hint=hint) from None


def deprecated(old: str, new: str, *, gone: str) -> None:
    """Warn that a name goes away, and say what to use. gone: the first version without it."""
    warnings.warn(f"{old} is deprecated and goes in {gone}: use {new}", FutureWarning, stacklevel=3)
