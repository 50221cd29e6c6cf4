"""What the system says of a process of this machine."""

from pathlib import Path


def stat_field(process: int, place: int) -> str:
    """Return a field of /proc/PID/stat after the command: 0 is the letter of the state. Empty: no process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[place]
