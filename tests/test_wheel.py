"""A wheel of the sdist, installed in an environment of its own, works from another folder."""

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from piper.version import VERSION
from tests.docs.blocks import blocks_of

ROOT = Path(__file__).parents[1]
SECONDS = 400  # for one command
CORE = {
    "torch",
    "cloudpickle",
    "numpy",
    "rich",
    "safetensors",
    "typer",
}  # what an install without extras needs
EXTRAS = {"ray", "hf", "gpu", "site", "train", "dev"}
OPTIONAL = ["transformers", "tokenizers", "ray", "triton", "tensorboard", "torchdata", "playwright", "peft"]
BARE = f"""
import sys

sys.modules.update(dict.fromkeys({OPTIONAL!r}))
from piper.cli import main

for words in (
    "check mine.py:two",
    "train mine.py:two --on inline --out run",
    "export run moved --format dcp",
    "import mine.py:two moved --out again",
):
    sys.argv = ["piper", *words.split()]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""
TESTS = ("tests/ir", "tests/directives", "tests/plan", "tests/test_losses.py")  # no folder of the source
SDIST = "from setuptools import build_meta; build_meta.build_sdist('dist')"


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
    run(sys.executable, "-c", SDIST, folder=source)
    (sdist,) = (source / "dist").iterdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sdist, folder=folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", folder=folder)
    (wheel,) = folder.glob("torch_piper-*.whl")
    python = folder / "env" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", wheel, folder=folder)
    # A path in a .pth file is searched, but the .pth files there are not read: an editable install stays out.
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel) as opened:
        held = {name for name in opened.namelist() if name.startswith("piper/")}
        (metadata,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        fields = message_from_bytes(opened.read(metadata))
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "piper").rglob("*") if path.is_file()}
    assert held == {name for name in wanted if "__pycache__" not in name}
    needed = [str(text) for text in fields.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {re.match(r"[\w-]+", text)[0] for text in needed} == CORE  # type: ignore[index]
    assert set(fields.get_all("Provides-Extra", [])) == EXTRAS
    assert "Typing :: Typed" in fields.get_all("Classifier", []) and fields["Version"] == VERSION
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
    assert run(piper, "--version", folder=elsewhere) == f"piper {VERSION}\n"
    run(piper, "init", "mine", folder=elsewhere)
    run(piper, "view", "mine.py:two", "--out", "page.html", "--cluster", "h200", folder=elsewhere)
    page = (elsewhere / "page.html").read_text(encoding="utf-8")
    assert "<script" in page and f'content="piper {VERSION}"' in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_core_works_without_any_extra(environment: Path) -> None:
    """A recipe of `piper init` trains, is checked and saves where no optional package can be imported."""
    folder = environment / "core"
    folder.mkdir()
    python, piper = (environment / "env" / "bin" / name for name in ("python", "piper"))
    run(piper, "init", "mine", folder=folder)
    recipe = (
        (folder / "mine.py")
        .read_text()
        .replace("steps=50,", 'steps=2, checkpoint=piper.Checkpoint(folder="saved"),')
    )
    (folder / "mine.py").write_text(recipe)
    (folder / "bare.py").write_text(BARE)
    printed = run(python, "bare.py", folder=folder)
    assert (folder / "run/saved/step-00000002/checkpoint.json").is_file()
    assert "\nImported moved: weights and optimizer after 2 steps\n" in printed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tests_pass_with_the_wheel(environment: Path) -> None:
    """In a folder without the source, so that pytest finds the package that was installed."""
    folder = environment / "away"
    folder.mkdir()
    for name in ("tests", "recipes", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "pyproject.toml", folder / "pyproject.toml")
    python = environment / "env" / "bin" / "python"
    where = run(python, "-c", "import piper; print(piper.__file__)", folder=folder)
    assert where.startswith(str(environment / "env"))
    printed = run(python, "-m", "pytest", "-q", "--quick", "-p", "no:cacheprovider", *TESTS, folder=folder)
    assert re.search(r"^\d+ passed", printed, re.MULTILINE) and "failed" not in printed, printed
