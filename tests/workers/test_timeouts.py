"""The bounds in seconds stand in one record."""

import re
from pathlib import Path

import piper

FOLDERS = ("workers", "run", "runtime/comm")
CONSTANT = re.compile(r"^[A-Z][A-Z_]* = [\d.]+  # .*\bseconds\b", re.MULTILINE)


def test_no_other_module_has_a_constant_in_seconds() -> None:
    root = Path(piper.__file__).parent
    files = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    assert len(files) > 40
    texts = {path.name: CONSTANT.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {name: lines for name, lines in texts.items() if lines} == {}, "put it into workers/timeouts.py"
