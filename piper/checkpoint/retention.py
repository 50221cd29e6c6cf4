"""Removes old checkpoints during training. Those this process wrote or loaded are known to be intact."""

import os
import threading
from pathlib import Path

from piper.checkpoint.folder import intact, retain
from piper.checkpoint.target import UndroppedError
from piper.errors import ConfigError

Signature = tuple[tuple[str, int, int, int], ...]  # of each file: its name, number, bytes and time of change


class Retention:
    """Keeps the newest intact checkpoints of a folder, in a thread. Reads those it does not know in full."""

    def __init__(self) -> None:
        self.known: dict[Path, tuple[Signature, bool]] = {}
        self.thread: threading.Thread | None = None
        self.error: ConfigError | None = None

    def trust(self, path: Path) -> None:
        """Note that a checkpoint is intact as it is now."""
        self.known[path] = (signature_of(path), True)

    def good(self, path: Path) -> bool:
        """Return whether a checkpoint is intact. Read it once, and again only when its files change."""
        now = signature_of(path)
        if path not in self.known or self.known[path][0] != now:
            self.known[path] = (now, intact(path))
        return self.known[path][1]

    def start(self, folder: Path, keep: int) -> None:
        """Begin to drop all but the newest `keep` good checkpoints of a folder."""
        assert self.thread is None, "one at a time"

        def work() -> None:
            try:
                retain(folder, keep, self.good)
            except ConfigError as error:
                self.error = error
            except OSError as error:
                self.error = UndroppedError(
                    "old checkpoints could not be looked at",
                    by="save",
                    facts={"path": str(folder), "why": str(error)},
                    hint="the newest is complete; see who may read this folder",
                )
            self.known = {path: known for path, known in self.known.items() if path.exists()}

        self.thread = threading.Thread(target=work, name="retention", daemon=True)
        self.thread.start()

    def finish(self) -> ConfigError | None:
        """Wait until old checkpoints are dropped. Return the error if that failed. None: it did not."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        error, self.error = self.error, None
        return error


def signature_of(path: Path) -> Signature:
    """Return the signature of a checkpoint's files. It changes when a file is written to."""
    try:
        found = [(entry.name, entry.stat()) for entry in os.scandir(path)]
    except OSError:
        return ()  # it is gone: nothing is known of it
    return tuple(sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in found))
