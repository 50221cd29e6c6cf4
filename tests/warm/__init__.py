"""Processes that tests start in milliseconds: they are forked from one that has imported torch and `piper`.

A new Python process spends six seconds of a core on imports, which is more than most tests of processes do. `Popen`
and `run` here are those of `subprocess`, except that a Python program is run by a fork of a warm process. The fork is a
child of the process that asked, has the arguments, environment, folder and descriptors that it was given, also in
`/proc`, and is warm itself: a fork server or a rank that it starts takes milliseconds, too.
"""

from tests.warm.popen import Popen, children, run, warm_fork_servers, warm_raylets

__all__ = ["Popen", "children", "run", "warm_fork_servers", "warm_raylets"]
