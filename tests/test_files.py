"""Files that a user names are replaced only where Piper wrote them."""

import subprocess
import sys
from inspect import cleandoc
from pathlib import Path

import pytest

from piper.data import ByteTokenizer, write_tokens
from piper.errors import ConfigError
from piper.process.files import write_output


def test_a_file_of_ours_is_replaced_and_another_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_output(path, "# by us\n1\n", "# by us")
    write_output(path, "# by us\n2\n", "# by us")
    assert path.read_text() == "# by us\n2\n"
    path.write_text("mine\n")
    with pytest.raises(ConfigError) as error:
        write_output(path, "# by us\n3\n", "# by us")
    assert str(error.value) == cleandoc(f"""
        {path}: this file exists, and Piper did not write it
          has:  5 bytes
          hint: name another file, or move this one away first
    """)
    assert path.read_text() == "mine\n"
    link = tmp_path / "link"
    link.symlink_to("a.txt")
    with pytest.raises(ConfigError, match="Piper did not write it"):
        write_output(link, "# by us\n3\n", "# by us")
    assert path.read_text() == "mine\n"


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        write_output(tmp_path / "none" / "a.txt", "# by us\n", "# by us", "the page")
    assert str(error.value) == cleandoc(f"""
        {tmp_path}/none/a.txt: the page cannot be written
          why:  No such file or directory
          hint: name a file in a folder that exists and that you own
    """)


def test_a_mark_may_be_at_the_end_and_an_empty_file_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.touch()
    long = "x" * 20_000 + "# by us"
    for _ in range(2):
        write_output(path, long, "# by us")
    path.write_text("y" * 9000 + "# by us" + "y" * 9000)
    with pytest.raises(ConfigError, match="Piper did not write it"):
        write_output(path, long, "# by us")
    write_output(Path("/dev/null"), long, "# by us")


def test_tokens_of_another_text_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    assert write_tokens(ByteTokenizer(), "abc", path) == 3
    assert write_tokens(ByteTokenizer(), "abc", path) == 3
    with pytest.raises(ConfigError, match="this file exists, and Piper did not write it"):
        write_tokens(ByteTokenizer(), "abd", path)
    assert path.read_bytes() == b"a\0b\0c\0"


def test_a_schedule_over_a_picture_of_the_users(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "piper", "schedule", "1f1b", "--ranks", "2", "--microbatches", "2"]
    mine, ours = tmp_path / "mine.svg", tmp_path / "ours.svg"
    mine.write_text("<svg></svg>")
    codes = [
        subprocess.run([*words, "--svg", str(path)], capture_output=True, check=False).returncode
        for path in (ours, ours, mine)
    ]
    assert codes == [0, 0, 2]
    assert mine.read_text() == "<svg></svg>" and ours.read_text().startswith("<svg xmlns=")
