"""A cache of compiled code that is damaged, or cannot be written, is a warning and never an end."""

import sys
import warnings
from pathlib import Path

import pytest

import piper
from piper.capture.compile.cache import Cache, CacheEntry, usable_cache
from piper.cli import main
from tests.bad_recipes import TEXT
from tests.zoo import case

CODE = CacheEntry(artifact=b"code", files={})


def test_a_damaged_entry_is_named_and_absent(tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path, key=tmp_path / "key")
    cache.keep("abcd", CODE)
    path = tmp_path / "chunks" / "ab" / "abcd"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"chunks/ab/abcd is damaged: the code is compiled again"):
        assert cache.find("abcd") is None
    cache.keep("abcd", CODE)
    with warnings.catch_warnings(action="error"):
        assert cache.find("abcd") == CODE


def test_a_cache_that_can_be_written_is_used(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="error"):
        assert usable_cache(tmp_path / "new").folder == tmp_path / "new"


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(
        UserWarning, match=r"file/cache cannot be written .*so compiled code is not kept"
    ) as seen:
        cache = usable_cache(tmp_path / "file" / "cache")
    assert len(seen) == 1
    assert cache.folder.is_dir() and tmp_path not in cache.folder.parents
    cache.keep("abcd", CODE)
    assert cache.find("abcd") == CODE


def test_programs_of_one_job_share_what_replaces_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mlp = case("mlp")
    job = piper.Job(model=mlp.model, loss=mlp.loss, data=lambda: [mlp.batch(8, 0)], strategy=[])
    with pytest.warns(UserWarning, match="cannot be written") as warned:
        program = piper.compile(job, device="cpu", compile=True, cache=tmp_path / "file" / "cache")
        evaluation = program.evaluation(mlp.batch(8, 0))
    assert len(warned) == 1 and evaluation.cache == program.cache
    assert {code.cache for code in evaluation.codes.values()} == {program.cache}


@pytest.mark.slow
@pytest.mark.timeout(240)  # compilers run
def test_a_run_goes_on_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(TEXT)
    (tmp_path / ".cache").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["piper", "train", "net.py:fine", "--on", "inline", "--compile"])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert not ended.value.code
    assert shown.err.startswith("warning: the cache ~/.cache/piper cannot be written (")
    assert shown.err.count("warning: ") == 1 and "Traceback" not in shown.err
    assert "Trained 3 steps" in shown.out
