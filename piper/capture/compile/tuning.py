"""Keeps which form of each kernel was the fastest, so that a later process need not measure them again.

Inductor measures the forms of a kernel when it first runs, and writes the fastest into the folder in which
the kernel was compiled. That is the working folder of one process, and it ends with the process.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch._inductor.runtime.triton_heuristics import CachingAutotuner, check_autotune_cache

from piper.attributes import replaced
from piper.capture.compile.cache import Cache
from piper.errors import ConfigError

log = logging.getLogger("piper")


@contextmanager
def tuning_in(folder: Path) -> Iterator[list[Path]]:
    """Let kernels that are loaded inside read and write their fastest forms in a folder.

    Yield a list, to which the files of the kernels are added that have not been measured yet.
    """
    unmeasured: list[Path] = []
    recheck: Callable[..., None] = CachingAutotuner.recheck_autotune_cache

    def recheck_here(kernel: CachingAutotuner, *args: object, **kwargs: object) -> None:
        forms = [result.config for result in kernel.compile_results]
        if kernel.filename is not None:
            written = Path(kernel.filename)  # by the process that compiled it
            kernel.filename = str(folder / written.parent.name / written.name)
        recheck(kernel, *args, **kwargs)
        if len(kernel.compile_results) == 1 < len(forms):
            # The fastest form was measured beside those that Inductor adds while it loads: not again.
            kernel.inductor_meta = {**kernel.inductor_meta, "dynamic_scale_rblock": False}
        elif len(forms) > 1:
            _, found, _ = check_autotune_cache(forms, kernel.filename, kernel.inductor_meta)
            if found is not None and found.local_cache is not None:
                file = Path(found.local_cache[1])
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                kernel.save_cache_hook = found.save
                unmeasured.append(file)

    with replaced(CachingAutotuner, "recheck_autotune_cache", recheck_here):
        yield unmeasured


def keep_measured(name: str, cache: Cache, files: list[Path]) -> None:
    """Add the files of kernels that have been measured since to an entry of the cache."""
    entry, folder = cache.find(name), cache.working_folder()
    found = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files if file.exists()}
    if entry is None or not found:
        return
    try:
        cache.keep(name, replace(entry, files={**entry.files, **found}))
    except ConfigError as error:  # the step that measured them goes on
        log.warning("Which kernels are the fastest is not kept for the next run: %s", error.what)
