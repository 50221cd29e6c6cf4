"""The cache gives back what this user has written, and nothing else."""

import hashlib
import hmac
import json
import os
import shutil
import stat
from inspect import cleandoc
from pathlib import Path

import pytest

from piper.capture.compile.cache import Cache, CacheEntry
from piper.errors import ConfigError

ENTRY = CacheEntry(artifact=b"artifact", files={"ab/kernel.so": b"library", "cd/code.py": b"source"})
NAME, OTHER = "a1" * 32, "a2" * 32


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(folder=tmp_path / "cache", key=tmp_path / "config" / "key")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_entry_comes_back(cache: Cache) -> None:
    assert cache.find(NAME) is None and cache.empty()
    cache.keep(NAME, ENTRY)
    assert cache.find(NAME) == ENTRY and not cache.empty()
    cache.keep(NAME, CacheEntry(artifact=b"newer", files={}))
    assert cache.find(NAME) == CacheEntry(artifact=b"newer", files={})
    assert mode(cache.folder) == 0o700
    assert mode(cache.key.parent) == 0o700
    assert mode(cache.key) == 0o600


def test_every_changed_file_is_noticed(cache: Cache) -> None:
    cache.keep(NAME, ENTRY)
    files = [path for path in cache.folder.rglob("*") if path.is_file()]
    assert len(files) == 4
    for path in files:
        whole = path.read_bytes()
        for damaged in (whole[:-1] + b"?", whole[:-1], whole + b"?", b""):
            path.write_bytes(damaged)
            assert cache.find(NAME) is None, path
        path.write_bytes(whole)
        assert cache.find(NAME) == ENTRY


def test_an_entry_is_not_taken_for_another(cache: Cache) -> None:
    cache.keep(NAME, ENTRY)
    entries = cache.folder / "chunks" / "a1"
    shutil.copytree(entries, cache.folder / "chunks" / "a2")
    (cache.folder / "chunks" / "a2" / NAME).rename(cache.folder / "chunks" / "a2" / OTHER)
    assert cache.find(OTHER) is None


def test_an_entry_that_another_key_has_signed(cache: Cache, tmp_path: Path) -> None:
    """A cache that was brought from elsewhere, with every digest right."""
    Cache(folder=cache.folder, key=tmp_path / "other" / "key").keep(NAME, ENTRY)
    assert cache.find(NAME) is None


def test_a_digest_without_a_key_is_not_enough(cache: Cache) -> None:
    cache.keep(NAME, ENTRY)
    evil = b"\x80\x04cos\nsystem\n"
    digest = hashlib.sha256(evil).hexdigest()
    blob = cache.folder / "files" / digest[:2] / digest
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(evil)
    manifest = json.dumps({"": digest}).encode()
    for signature in (hashlib.sha256(manifest).digest(), hmac.digest(b"", manifest, "sha256"), b"\0" * 32):
        (cache.folder / "chunks" / "a1" / NAME).write_bytes(signature + manifest)
        assert cache.find(NAME) is None


@pytest.mark.parametrize("given", [0o770, 0o707, 0o777, 0o720])
def test_a_folder_that_others_may_write_to_is_refused(cache: Cache, given: int) -> None:
    cache.folder.mkdir()
    cache.folder.chmod(given)
    with pytest.raises(ConfigError) as caught:
        cache.find(NAME)
    assert str(caught.value) == cleandoc(f"""
        cache: a folder that others may use is not trusted
          path: {cache.folder}
          why:  its mode is {given:04o}
          hint: remove it, or name another; mode 0700 is meant
    """)


def test_a_folder_that_others_may_read_is_closed_to_them(cache: Cache) -> None:
    cache.folder.mkdir(mode=0o755)
    cache.folder.chmod(0o755)
    cache.keep(NAME, ENTRY)
    assert mode(cache.folder) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(cache: Cache) -> None:
    cache.folder.mkdir(mode=0o700)
    os.chown(cache.folder, 12345, 12345)
    with pytest.raises(ConfigError, match="it belongs to user 12345, and this process runs as user 0"):
        cache.keep(NAME, ENTRY)


@pytest.mark.parametrize("broken", ["short", "readable", "link"])
def test_a_key_that_cannot_be_trusted(cache: Cache, tmp_path: Path, broken: str) -> None:
    cache.keep(NAME, ENTRY)
    if broken == "short":
        cache.key.write_bytes(b"k")
    elif broken == "readable":
        cache.key.chmod(0o644)
    else:
        cache.key.rename(tmp_path / "elsewhere")
        cache.key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cache: a key file that others may use is not trusted"):
        cache.find(NAME)


def test_files_are_restored_to_a_folder_of_the_process(cache: Cache) -> None:
    cache.keep(NAME, ENTRY)
    found = cache.find(NAME)
    assert found is not None
    folder = cache.restore(found)
    assert folder.parent == cache.folder / "work"
    assert mode(folder) == 0o700
    assert (folder / "ab" / "kernel.so").read_bytes() == b"library"
    assert (folder / "cd" / "code.py").read_bytes() == b"source"
    assert cache.working_folder() == folder


def test_working_folders_of_processes_that_have_ended_are_removed(cache: Cache) -> None:
    work = cache.folder / "work"
    own = cache.working_folder()
    name = own.name
    own.rename(work / name.replace(f"-{os.getpid()}-", "-999999999-"))
    elsewhere = work / "another.host-1-5"
    elsewhere.mkdir()
    assert cache.working_folder().name == name
    assert sorted(path.name for path in work.iterdir()) == sorted([name, "another.host-1-5"])
