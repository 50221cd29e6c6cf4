"""Where the key of a torchrun job comes from, and who can read it."""

import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from inspect import cleandoc
from pathlib import Path

import pytest

from piper.errors import ConfigError, LaunchError
from piper.workers import rendezvous as keys
from piper.workers.rank_agent import ServedAgent
from piper.workers.rank_environment import RankEnvironment
from piper.workers.rendezvous import DriverAddress, read_address
from piper.workers.transport.channel import ANSWER, GREETING, NONCE

HERE = RankEnvironment(rank=1, size=2, local=1, nearby=2, address="here", port=29500)
FAR = RankEnvironment(rank=1, size=2, local=0, nearby=1, address="here", port=29500)
HINT = (
    "give every rank the same 32 or more random characters in PIPER_KEY (openssl rand -hex 32), or in a file "
    "of mode 0600 that PIPER_KEY_FILE names"
)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("PIPER_KEY", "PIPER_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "piper"


def test_a_key_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert keys.given_key() is None
    file = tmp_path / "key"
    file.write_text("f" * 40 + "\n", encoding="ascii")
    file.chmod(0o600)
    monkeypatch.setenv("PIPER_KEY_FILE", str(file))
    assert keys.given_key() == b"f" * 40
    monkeypatch.setenv("PIPER_KEY", "e" * 32)
    assert keys.given_key() == b"e" * 32
    monkeypatch.setenv("PIPER_KEY", "e" * 31)
    with pytest.raises(ConfigError) as caught:
        keys.given_key()
    assert (
        str(caught.value) == f"launch: the key is shorter than 32 characters\n  length: 31\n  hint:   {HINT}"
    )


def test_a_key_file_that_others_may_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "key"
    monkeypatch.setenv("PIPER_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match="there is no key file"):
        keys.given_key()
    file.write_text("f" * 40, encoding="ascii")
    file.chmod(0o640)
    with pytest.raises(ConfigError) as caught:
        keys.given_key()
    assert str(caught.value) == cleandoc(f"""
        launch: a key file that others may use is not trusted
          path: {file}
          why:  its mode is 0640
          hint: chmod 600 {file}, and make it yours
    """)
    link = tmp_path / "link"
    link.symlink_to(file)
    monkeypatch.setenv("PIPER_KEY_FILE", str(link))
    with pytest.raises(ConfigError, match="a key file that others may use is not trusted"):
        keys.given_key()


def test_one_machine_shares_a_key_through_a_file_of_its_user(runtime: Path) -> None:
    launch = secrets.token_hex(16)
    with keys.offered_key(launch) as key:
        assert len(key) == 32
        assert keys.fetched_key(launch, 1) == key
        (file,) = runtime.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert list(runtime.iterdir()) == []
    with pytest.raises(LaunchError) as caught:
        keys.fetched_key(launch, 1)
    assert str(caught.value) == cleandoc(f"""
        rank 1: this rank does not have the key of the launch
          why:  rank 0 made one in a file of its own machine and user, and it is not here
          hint: {HINT}
    """)


def test_the_name_of_a_launch_is_no_path(runtime: Path, tmp_path: Path) -> None:
    """It comes from torchrun's store, into which anybody can write."""
    keys.runtime_folder()
    (tmp_path / "other").write_bytes(b"x" * 32)
    (tmp_path / "other").chmod(0o600)
    for name in ("../other", str(tmp_path / "other"), "", ".", "a" * 31, "A" * 32):
        with pytest.raises(LaunchError, match="this rank does not have the key of the launch"):
            keys.fetched_key(name, 1)


def test_a_folder_that_others_may_write_to(runtime: Path) -> None:
    runtime.mkdir()
    runtime.chmod(0o777)
    with pytest.raises(ConfigError) as caught, keys.offered_key(secrets.token_hex(16)):
        pass
    assert str(caught.value) == cleandoc(f"""
        launch: a folder that others may use is not trusted
          path: {runtime}
          why:  its mode is 0777
          hint: remove it, or name another; mode 0700 is meant
    """)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    os.chown(runtime, 12345, 12345)
    with pytest.raises(ConfigError, match="it belongs to user 12345, and this process runs as user 0"):
        keys.runtime_folder()


def test_the_key_of_a_launch_that_was_killed_is_removed(runtime: Path) -> None:
    stale = keys.runtime_folder() / secrets.token_hex(16)
    stale.write_bytes(b"x" * 32)
    os.utime(stale, (time.time() - 2 * 24 * 3600,) * 2)
    with keys.offered_key(secrets.token_hex(16)):
        assert not stale.exists()


def test_several_machines_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys.check_key(HERE)
    with pytest.raises(LaunchError) as caught:
        keys.check_key(FAR)
    assert str(caught.value) == cleandoc(f"""
        rank 1: ranks on several machines need a key
          why:  each proves that it knows one, and torchrun's store is open to every process
          hint: {HINT}
    """)
    monkeypatch.setenv("PIPER_KEY", "k" * 32)
    keys.check_key(FAR)


def test_the_store_holds_no_secret() -> None:
    door = DriverAddress(host="127.0.0.1", port=1, launch="a" * 32, spares=False)
    assert asdict(door) == {"host": "127.0.0.1", "port": 1, "launch": "a" * 32, "spares": False}
    assert read_address(HERE, json.dumps(asdict(door)).encode()) == door


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x80\x04",
        b"[]",
        b'{"host": "h"}',
        b'{"host": "h", "port": "1", "launch": "", "spares": false}',
        b'{"host": "h", "port": 1, "launch": "", "spares": false, "key": "k"}',
        b'{"host": "h", "port": 1, "launch": "", "spares": 1}',
        b'{"host": "h", "port": 1, "launch": ""}',
    ],
)
def test_a_store_that_somebody_else_has_written_to(text: bytes) -> None:
    with pytest.raises(LaunchError, match="the processes of this world do not find each other"):
        read_address(HERE, text)


@contextmanager
def false_driver() -> Iterator[tuple[str, int]]:
    """Answer workers as a driver that does not know the key would."""
    done = threading.Event()

    def answer(door: socket.socket) -> None:
        while not done.is_set():
            try:
                end, _ = door.accept()
            except TimeoutError:
                continue
            with end:
                end.settimeout(2.0)
                end.sendall(GREETING + b"n" * NONCE)
                end.recv(ANSWER, socket.MSG_WAITALL)
                end.sendall(b"p" * 32 + b"\0" * 7 + b"\x20" + b"\x80\x04" + b"x" * 30)

    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0.1)
        thread = threading.Thread(target=answer, args=(door,))
        thread.start()
        try:
            yield door.getsockname()
        finally:
            done.set()
            thread.join(10)


def test_a_rank_reads_nothing_from_a_driver_that_does_not_know_the_key() -> None:
    launch = secrets.token_hex(16)
    with keys.offered_key(launch), false_driver() as (host, port), pytest.raises(LaunchError) as caught:
        ServedAgent(HERE, DriverAddress(host=host, port=port, launch=launch, spares=False)).wait()
    assert str(caught.value) == cleandoc(f"""
        rank 1: this rank and rank 0 do not know the same key
          at:   {host}:{port}
          why:  what listens there does not know the key
          hint: {HINT}
    """)
