"""The programs of an elastic job, one for each number of devices, and the file that asks for a number."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from piper.capture.compile.cache import CACHE
from piper.compiler import Program, compile
from piper.errors import ConfigError, ScheduleError
from piper.job import directives_for
from piper.run.elastic import ElasticRange, ElasticRecovery
from piper.run.recovery import Recovery
from piper.run.run import Run

DEVICES = "devices"  # the file of a run's folder that asks for a number of devices


def sessions_of(program: Program) -> Callable[..., Recovery]:
    """Return the class of the sessions of a run."""
    if program.job.elastic is None:
        return Recovery
    return partial(ElasticRecovery, sizes=sizes_of(program, *program.job.elastic))


def sizes_of(program: Program, fewest: int, most: int) -> ElasticRange:
    """Return the programs of an elastic job, each compiled when it is first asked for."""

    @cache
    def sized(devices: int) -> Program:
        if devices == most:
            return program
        job = replace(program.job, strategy=directives_for(program.job, devices), elastic=None)
        cache, compiled = program.cache or CACHE, program.cache is not None
        return compile(job, device=program.device, compile=compiled, cache=cache, captured=program)

    return ElasticRange(fewest=fewest, most=most, program=sized)


class SizeFile:
    """The file in a run's folder that asks for a number of devices: `echo 2 > DIR/devices`."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.path, self.say, self.seen = folder / DEVICES, say, ""

    def _text(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def obey(self, run: Run) -> None:
        """Let a run go on with the number of devices that was asked for since the last look."""
        text = self._text()
        if text == self.seen or not run.sessions.elastic:
            return
        self.seen = text
        try:
            if text.isdecimal():
                run.resize(int(text))
            elif text:
                self.say(f"warning: {self.path} asks for {text!r}, which is not a number of devices")
        except (ConfigError, ScheduleError) as error:
            self.say(f"warning: {error}")
