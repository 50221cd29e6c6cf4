"""How long one process waits for another, in seconds: every such bound of the driver, agents and workers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds in seconds. Those of a run are options: `launch(timeout=)`, `--stall`, `--grace`."""

    # Ranks of torchrun
    rank_away: float = 120.0  # a rank tries to reach rank 0 again: a network may need so long to recover
    rank_retry: float = 1.0  # and pauses so long between two tries
    rank_place: float = 5.0  # an agent that has connected says where it runs: its message is short
    rank_poll: float = 0.2  # a rank looks whether rank 0 has launched, or has ended
    ranks_leave: float = 10.0  # rank 0, which may hold the store, waits until the others know that it ends
    results_sent: float = 5.0  # rank 0 waits until the other ranks have its last results


TIMEOUTS = Timeouts()
