"""What README shows is what happens."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from piper import ScheduleError, at, order, place, split
from piper.directives import apply
from piper.ir.chain import chain
from piper.ir.graph import start
from piper.lower.lower import lower

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[tuple[int, str]]:
    """The code blocks of a language, with the line each begins at."""
    found = re.finditer(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [(README[: match.start(1)].count("\n"), match[1]) for match in found]


def test_python_blocks_run_in_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("readme")  # tracing looks up the module of the code it traces
    monkeypatch.setitem(sys.modules, "readme", module)
    for line, code in blocks("python"):
        exec(compile("\n" * line + code, "README.md", "exec"), vars(module))
    shown = capsys.readouterr().out
    quoted = next(text for _, text in blocks("text") if text.startswith("B[PP=1 MB=0]:"))
    for text in quoted.splitlines():
        assert text in shown or text == "  ...", f"README shows {text!r}, the program printed\n{shown}"


@pytest.mark.parametrize("block", [text for _, text in blocks("console")])
def test_console_blocks_print_what_they_show(block: str) -> None:
    command, _, shown = block.partition("\n")
    words = command.removeprefix("$ ").split()
    assert words[0] == "piper"
    done = subprocess.run(
        [sys.executable, "-m", "piper", *words[1:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=50,
        check=True,
    )
    assert done.stdout == shown


def test_the_refused_strategy_is_refused_in_these_words() -> None:
    swapped = order([[at(PP=1, MB=0, PASS="F")], [at(PP=0, MB=0, PASS="F")]])
    strategy = [
        place(at(PP=0), [0]),
        place(at(PP=1), [0]),
        split(at(), parts=2),
        replace(swapped, source="llama.py:41"),
    ]
    with pytest.raises(ScheduleError) as error:
        lower(apply(start(chain(2)), strategy))
    assert f"{error.value}\n" in [text for _, text in blocks("text")]


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
