"""The images are built from the wheel, with pinned versions and without root; hadolint has nothing to say."""

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
STAGES = {
    match[2]: match[0]
    for match in re.finditer(r"^FROM (\S+) AS (\w+)\n(?:(?!FROM ).*\n)*", TEXT, re.MULTILINE)
}
IMAGES = ("cpu", "cuda")


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_stages_and_their_bases_are_pinned() -> None:
    assert [*STAGES] == ["wheel", *IMAGES]
    for text in STAGES.values():
        assert re.match(r"FROM python:3\.11\.\d+-(slim-)?bookworm AS", text)


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_installs_the_wheel_with_pinned_versions_and_runs_without_root(name: str) -> None:
    lines = STAGES[name].splitlines()
    installs = re.findall(r"pip install (.*?)(?= && |\n)", STAGES[name])
    assert all("--constraint /tmp/constraints.txt" in install for install in installs)
    assert '"$(echo /tmp/wheels/*.whl)[' in installs[-1]
    assert "COPY --from=wheel /wheels /tmp/wheels" in lines
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 1000"]
    assert lines.index(users[0]) > max(n for n, line in enumerate(lines) if line.startswith("RUN "))


def test_extras_of_the_images_exist() -> None:
    known = set(
        re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for extras in re.findall(r"whl\)\[([\w,]+)\]", TEXT):
        assert set(extras.split(",")) <= known


def test_the_builder_gets_what_is_copied_and_nothing_else() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = {
        word
        for words in re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.MULTILINE)
        for word in words.split()
    }
    assert copied == sent
    assert all((ROOT / name).exists() and not fnmatch(name, "*/*") for name in copied)
