"""The exit codes of the command line."""

SUCCESS = 0
NO = 1  # the answer of a check
USER_ERROR = 2
PREEMPTED = 75  # EX_TEMPFAIL: try again
INTERRUPTED = 130  # as a shell has it after Ctrl-C
