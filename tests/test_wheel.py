"""A wheel, installed in an environment of its own, runs the README's example from another folder."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of

ROOT = Path(__file__).parents[1]
SECONDS = 240  # for one command


def run(*command: object, folder: Path) -> str:
    """Run a command in a folder, without this environment's variables; return what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which finds torch where this environment has it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "piper", source / "piper", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source, folder=folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", folder=folder)
    (wheel,) = folder.glob("torch_piper-*.whl")
    python = folder / "env" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", wheel, folder=folder)
    # A path in a .pth file is searched, but the .pth files there are not read: an editable install stays out.
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel) as opened:
        held = {name for name in opened.namelist() if name.startswith("piper/")}
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "piper").rglob("*") if path.is_file()}
    assert held == {name for name in wanted if "__pycache__" not in name}
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_readme_runs_from_another_folder(environment: Path) -> None:
    elsewhere = environment / "elsewhere"
    elsewhere.mkdir()
    readme = blocks_of((ROOT / "README.md").read_text(encoding="utf-8"), "README.md")
    example = next(block.text for block in readme if block.language == "python")
    (elsewhere / "example.py").write_text(example)
    python, piper = (environment / "env" / "bin" / name for name in ("python", "piper"))
    where = run(python, "-c", "import piper; print(piper.__file__)", folder=elsewhere)
    assert where.startswith(str(environment / "env"))
    lines = run(python, "example.py", folder=elsewhere).splitlines()
    assert [line[:6] for line in lines] == ["loss 5", "loss 5"]
    assert run(piper, "--version", folder=elsewhere) == "piper 0.1.0\n"
    run(piper, "init", "mine", folder=elsewhere)
    run(piper, "view", "mine.py:two", "--out", "page.html", "--cluster", "h200", folder=elsewhere)
    assert "<script" in (elsewhere / "page.html").read_text(encoding="utf-8")
