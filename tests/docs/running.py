"""Runs the blocks of a page, in order, in a folder of their own."""

import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import typer
from typer.exceptions import TyperException

from piper.cli import app_with, main
from piper.errors import PiperError
from tests import warm
from tests.docs.blocks import Block, looks_like

NOT_RUN = "not run:"
FIGURE = "figure"
MAKEFILE = Path(__file__).parents[2] / "Makefile"
SECONDS = 150  # that a command of the shell may take: torchrun starts processes that import torch


class BrokenPageError(AssertionError):
    """A block that does not do what the page says."""


class WarmPopen(warm.Popen):
    """A process that a command of a page starts. Where it is `piper` or `torchrun`, it has imported torch already."""

    def __init__(self, words: Sequence[str], *rest: Any, **options: Any) -> None:  # noqa: ANN401
        program = shutil.which(words[0]) if words[0] in ("piper", "torchrun") else None
        super().__init__(
            words if program is None else [sys.executable, program, *words[1:]], *rest, **options
        )


class Reader:
    """Someone who follows a page literally, from the first block to the last."""

    def __init__(self, page: str) -> None:
        name = "page_" + Path(page).stem.replace("-", "_")
        self.module = ModuleType(name)  # tracing looks up the module of the code it traces
        self.printed: str | None = None  # by the block before, until it is compared
        self.raised: Block | None = None  # a block whose error the next one has to show

    def follow(self, block: Block) -> None:
        """Do what a block says."""
        if self.raised is not None and block.language != "text":
            raise BrokenPageError(f"{self.raised.where}: it raises, and no text shows what\n{self.printed}")
        if block.note.startswith(NOT_RUN):
            parse_commands(block)
            return
        match block.language:
            case "text" if block.note == FIGURE:
                pass
            case "text":
                self.compare(block)
            case "python" if block.file is None:
                self.run_python(block)
            case "python" | "bash" | "json" | "csv" | "toml" if block.file is not None:
                add_to_file(Path(block.file), block.text)
            case "console":
                self.run_console(block)
            case "bash":
                run_commands(block)
            case language:
                raise BrokenPageError(
                    f"{block.where}: nobody knows how to run {language or 'a block of no language'}"
                )

    def finish(self) -> None:
        """Say what is still open at the end of the page."""
        if self.raised is not None:
            raise BrokenPageError(f"{self.raised.where}: it raises, and no text shows what\n{self.printed}")

    def run_python(self, block: Block) -> None:
        """Run code in the page's namespace; an error of ours is output, as Python would show it."""
        code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
        output = io.StringIO()
        sys.modules[self.module.__name__] = self.module
        with redirect_stdout(output):
            try:
                exec(code, vars(self.module))
            except PiperError as error:
                self.raised = block
                output.write(f"{type(error).__name__}: {error}\n")
            except Exception as error:
                raise BrokenPageError(f"{block.where}: {type(error).__name__}: {error}") from error
        self.printed = output.getvalue()

    def run_console(self, block: Block) -> None:
        """Run every command of a block, and compare what it prints with what is shown below it."""
        for entry in block.text.removeprefix("$ ").split("\n$ "):
            command, _, shown = entry.partition("\n")
            code, printed = run_command(command)
            if not looks_like(shown, printed):
                raise BrokenPageError(
                    f"{block.where}: {command} printed\n{printed}and the page shows\n{shown}"
                )
            if code and "error" not in shown and "Not the same" not in shown:
                raise BrokenPageError(f"{block.where}: {command} ended with {code}\n{printed}")

    def compare(self, block: Block) -> None:
        """Compare a text with what the block before printed."""
        if self.printed is None:
            raise BrokenPageError(
                f"{block.where}: nothing has printed this; a text that nothing prints is a {FIGURE}"
            )
        if not looks_like(block.text, self.printed):
            raise BrokenPageError(
                f"{block.where}: it printed\n{self.printed}and the page shows\n{block.text}"
            )
        self.printed = self.raised = None


def commands_of(text: str) -> list[str]:
    """The commands of a block, one a line; a backslash joins lines."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def add_to_file(path: Path, text: str) -> None:
    """Write a file, or add to one, and let it be imported anew."""
    before = path.read_text(encoding="utf-8") + "\n\n" if path.exists() else ""
    path.write_text(before + text, encoding="utf-8")
    sys.modules.pop(path.stem, None)


def run_commands(block: Block) -> None:
    """Run commands whose output is not shown."""
    for command in commands_of(block.text):
        code, printed = run_command(command)
        if code:
            raise BrokenPageError(f"{block.where}: {command} ended with {code}\n{printed}")


@patch.object(subprocess, "Popen", WarmPopen)
def run_command(command: str) -> tuple[int, str]:
    """Run a command of a page: ours and Python's in this process, which has torch; what it printed."""
    words = shlex.split(command, comments=True)
    if words[0] not in ("piper", "python") or words[1] == "-m":
        done = subprocess.run(
            words if words[0] == "torchrun" else ["bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        return done.returncode, done.stdout
    output, argv = io.StringIO(), sys.argv
    sys.argv = words if words[0] == "piper" else words[1:]
    code: object = 0
    with redirect_stdout(output), redirect_stderr(output):
        try:
            if words[0] == "piper":
                main()
            else:
                run_path(words[1], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        finally:
            sys.argv = argv
    return (code if isinstance(code, int) else 0), output.getvalue()


def parse_commands(block: Block) -> None:
    """Check what can be checked of commands that are not run: the shell's grammar, and our options."""
    if block.language != "bash" or not block.note.removeprefix(NOT_RUN).strip():
        raise BrokenPageError(f"{block.where}: only commands can be left out, and only with a reason")
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise BrokenPageError(f"{block.where}: {done.stderr}")
    for command in commands_of(block.text):
        words = shlex.split(command, comments=True)
        if "piper" in words:
            check_options(block, words[words.index("piper") + 1 :])
        elif words[0] == "make":
            check_target(block, words[1])


def check_options(block: Block, words: list[str]) -> None:
    """Refuse a verb or an option that the command line has not got."""
    verbs = vars(typer.main.get_command(app_with()))["commands"]
    if not words or words[0] not in verbs:
        raise BrokenPageError(f"{block.where}: piper {' '.join(words)}: there is no such verb")
    try:
        verbs[words[0]].make_context(words[0], words[1:])
    except TyperException as error:
        raise BrokenPageError(f"{block.where}: piper {' '.join(words)}: {error}") from error


def check_target(block: Block, target: str) -> None:
    """Refuse a target that the Makefile has not got."""
    if not re.search(rf"^{re.escape(target)}:", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE):
        raise BrokenPageError(f"{block.where}: make {target}: there is no such target")
