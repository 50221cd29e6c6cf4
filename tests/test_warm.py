"""A program that is forked from a warm process is what a new Python process would be, and costs less."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

REPORT = """
import json, os, sys
def parts(name):
    return open(f"/proc/self/{name}").read().rstrip("\\0").split("\\0")
said = [sys.argv, os.getcwd(), os.getppid(), os.environ.get("WORD"), parts("cmdline"), "WORD=here" in parts("environ")]
print(json.dumps([*said, __name__, sys.stdin.read()]))
"""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the processes are new ones")


def said(words: list[str], **options: object) -> list[object]:
    done = warm.run(words, capture_output=True, text=True, timeout=60, check=True, **options)
    found: list[object] = json.loads(done.stdout)
    return found


@LINUX
def test_a_program_has_the_arguments_environment_folder_and_pipes_it_was_given(tmp_path: Path) -> None:
    env = {**os.environ, "WORD": "here"}
    words = [sys.executable, "-c", REPORT, "one", "two"]
    found = said(words, env=env, cwd=tmp_path, input="text")
    assert found == [
        ["-c", "one", "two"],
        str(tmp_path),
        os.getpid(),
        "here",
        words,
        True,
        "__main__",
        "text",
    ]
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    assert said([sys.executable, str(script), "one"], stdin=subprocess.DEVNULL)[0] == [str(script), "one"]
    assert said([sys.executable, "-m", "report"], cwd=tmp_path, stdin=subprocess.DEVNULL)[0] == [str(script)]


@pytest.mark.parametrize(
    ("code", "ended", "printed"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("import atexit; atexit.register(print, 'last', flush=True); print('first')", 0, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import signal; signal.raise_signal(signal.SIGINT)", -signal.SIGINT, ""),
    ],
)
def test_a_program_ends_as_it_would(code: str, ended: int, printed: str) -> None:
    done = warm.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (ended, printed)
    assert done.stdout.split() == (["first", "last"] if "first" in code else [])


def test_an_error_is_printed_with_its_trace() -> None:
    done = warm.run([sys.executable, "-c", "1 / 0"], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback ") and done.stderr.endswith(
        "ZeroDivisionError: division by zero\n"
    )


@LINUX
def test_programs_that_a_program_starts_are_warm_too() -> None:
    inner = "import sys; print('torch' in sys.modules)"
    code = f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {inner!r}], text=True))"
    assert warm.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["True"]


def test_descriptors_keep_their_numbers() -> None:
    here, there = socket.socketpair()
    with here, there:
        code = "import os, sys; os.write(int(sys.argv[1]), b'hello')"
        warm.run([sys.executable, "-c", code, str(there.fileno())], pass_fds=[there.fileno()], check=True)
        assert here.recv(5) == b"hello"


def test_a_process_that_is_killed_is_reaped_like_any_other() -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    with warm.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert os.getpgid(process.pid) == process.pid
        process.kill()
        assert process.wait(10) == -signal.SIGKILL


def test_other_programs_are_started_as_always() -> None:
    assert warm.run(["echo", "hello"], capture_output=True, text=True).stdout == "hello\n"
    fresh = [sys.executable, "-S", "-c", "import sys; print('torch' in sys.modules)"]
    assert warm.run(fresh, capture_output=True, text=True).stdout == "False\n"
    with pytest.raises(subprocess.CalledProcessError):
        warm.run([sys.executable, "-c", "raise SystemExit(1)"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.5)
