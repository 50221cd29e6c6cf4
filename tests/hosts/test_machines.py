"""The hosts that tests make for themselves: they are apart, they reach each other, and nothing is left of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.machines import hosts

pytestmark = pytest.mark.slow
PYTHON = sys.executable


def test_hosts_reach_each_other_and_leave_nothing() -> None:
    with pytest.raises(ZeroDivisionError), hosts(2) as (one, two):
        assert one.run("hostname") == "host0\n"
        assert "inet 10.99.0.2/24" in two.run("ip", "-4", "-o", "address", "show", "eth0")
        assert (
            one.run("sh", "-c", "ls /dev/shm /mnt | grep -v :; ip -o link | cut -d: -f2")
            == "\n lo\n eth0@if3\n"
        )
        listen = "import socket; s = socket.create_server(('10.99.0.2', 4000)); print('up', flush=True); s.accept()"
        server = two.start(PYTHON, "-ISc", listen)
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        call = "import socket; socket.create_connection(('10.99.0.2', 4000), 20)"
        two.unplug()
        with pytest.raises(AssertionError, match=r"No route|timed out"):
            one.run(PYTHON, "-ISc", call.replace("20", "0.2"))
        two.plug()
        one.run(PYTHON, "-ISc", call)
        assert server.wait(20) == 0
        sleeping = two.start("sleep", "300")
        two.kill()
        assert sleeping.wait(20) != 0
        firsts = [one.inside.first, two.inside.first, one.switch.first]
        raise ZeroDivisionError
    assert not [first for first in firsts if Path(f"/proc/{first}").exists()]
    assert "port0" not in subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
