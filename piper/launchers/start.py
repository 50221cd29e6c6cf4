"""Starting a program: on threads, on processes of this machine, or on Ray."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal, get_args

from piper.errors import ConfigError
from piper.launchers.base import Run
from piper.runtime.setup import ProgramLike
from piper.runtime.worker import Options

On = Literal["inline", "local", "ray"]
DEFAULT = Options()


@contextmanager
def launch(
    program: ProgramLike,
    on: On = "inline",
    *,
    timeout: float = DEFAULT.timeout,
    streams: bool = DEFAULT.streams,
    threads: int = DEFAULT.threads,
    keep_gradients: bool = DEFAULT.keep_gradients,
    keep_outputs: bool = DEFAULT.keep_outputs,
    resume: Path | str | None = None,
) -> Iterator[Run]:
    """Start a program's workers, and end them with the block.

    timeout: seconds that any one wait may take before the step ends with an error.
    streams: run streams side by side; otherwise a device does one thing at a time.
    threads: how many threads one computation uses. Runs give the same bits if they use the same number.
    keep_gradients, keep_outputs: keep each step's gradients, or what every chunk returned, to look at them.
    resume: the checkpoint to begin from. No process then builds the model: each reads what it needs.
    """
    options = Options(
        timeout=timeout,
        streams=streams,
        threads=threads,
        keep_gradients=keep_gradients,
        keep_outputs=keep_outputs,
        blank=resume is not None,
    )
    with launcher(program, on, options) as run:
        if resume is not None:
            run.load(resume)
        yield run


def launcher(program: ProgramLike, on: str, options: Options) -> AbstractContextManager[Run]:
    """The launcher of a name; the others are not imported."""
    match on:
        case "inline":
            from piper.launchers.inline import launch_inline

            return launch_inline(program, options)
        case "local":
            from piper.launchers.local import launch_local

            return launch_local(program, options)
        case "ray":
            from piper.launchers.ray import launch_ray

            return launch_ray(program, options)
    raise ConfigError(
        f"there is no launcher {on!r}", by="launch", hint="on is one of " + ", ".join(get_args(On))
    )
