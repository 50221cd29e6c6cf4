"""Every mistake in a recipe ends `piper train` with exit code 2 and one message that names the user's line."""

import re
import sys
from pathlib import Path

import pytest

from piper.cli import main
from tests import warm
from tests.bad_recipes import FILES, MESSAGES, TEXT, line_of

SLOW = {"net.py:loss_shapes", "net.py:data_missing_later", "net.py:worker_raises", "net.py:scheduler_plateau"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    for name, text in {**FILES, "net.py": TEXT}.items():
        (path / name).write_text(text)
    return path


def wanted(words: str) -> str:
    return re.sub(r"net\.py:<([\w ]+)>", lambda found: f"net.py:{line_of(found[1])}", MESSAGES[words]).strip()


def test_there_are_enough() -> None:
    named = [words for words, text in MESSAGES.items() if re.search(r"\w+\.(py|json):(<|\d)", text)]
    assert len(MESSAGES) >= 85
    assert len(named) >= 75, "the others have no line: a file or an option is not there"


@pytest.mark.parametrize(
    "words", [pytest.param(w, marks=pytest.mark.slow if w in SLOW else ()) for w in MESSAGES]
)
def test_a_bad_recipe_is_one_message(
    words: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(folder)
    on = () if "--on" in words else ("--on", "inline")
    out = () if "--out" in words or "--resume" in words else ("--out", str(tmp_path / "run"))
    monkeypatch.setattr(sys, "argv", ["piper", "train", *words.split(), *on, *out])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert (ended.value.code, shown.err.strip()) == (2, wanted(words))
    assert "Traceback" not in shown.out + shown.err
    assert shown.err.count("error: ") == 1


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        pytest.param("plan", "syntax.py:job"),
        pytest.param("train", "net.py:data_raises_later", marks=pytest.mark.slow),
        pytest.param("check", "net.py:optimizer_none", marks=pytest.mark.slow),
        pytest.param("simulate", "net.py:loss_key_error", marks=pytest.mark.slow),
    ],
)
def test_a_bad_recipe_from_a_shell(verb: str, words: str, folder: Path, tmp_path: Path) -> None:
    more = ["--on", "inline", "--out", str(tmp_path / "run")] if verb == "train" else []
    root = str(Path(__file__).parents[1])
    program = f"import sys; sys.path.insert(0, {root!r}); from piper.cli import main; main()"
    done = warm.run(
        [sys.executable, "-c", program, verb, words, *more],
        capture_output=True,
        text=True,
        timeout=55,
        cwd=folder,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (2, wanted(words))
    assert "Traceback" not in done.stdout
