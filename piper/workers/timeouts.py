"""How long one process waits for another, in seconds: every such bound of the driver, agents and workers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds in seconds. Those that depend on the job are `launch(timeout=)`, `--stall` and `--grace`."""

    # Starting
    meeting: float = 120.0  # workers, agents and ranks find each other: some start late, on busy machines
    fork_server_start: float = 120.0  # the driver waits for a fork server: importing torch may take so long
    machines_come: float = 60.0  # a start waits for machines: Ray needs half a minute to place lost bundles
    connect_pause: float = 0.2  # a worker tries to connect again: the listener was crowded
    accept: float = 1.0  # the driver waits for the next worker or agent, then looks at those it has

    # Ending
    process_end: float = 10.0  # the driver waits for the end of killed workers: the system frees their memory
    fork_server_end: float = 2.0  # a fork server ends by itself, or it is killed
    ray_answers: float = 10.0  # the port of a Ray cluster, which Ray itself would try for minutes
    folder_removed: float = 10.0  # a folder that must not stay is removed, by another process

    # Noticing that something is lost
    stopped: float = 2.0  # a process that is stopped counts as lost: a debugger may stop it briefly
    agent_sees_stopped: float = 3.0  # the same, seen by an agent, which is asked less often
    agent_answers: float = 3.0  # an agent answers if its machine can be reached
    agent_silent: float = 8.0  # an agent that does not answer counts as lost: a link may be down for a moment
    agents_settle: float = 8.0  # agents answer before a start counts the machines that are left
    agent_stall: float = 10.0  # a job with agents makes no progress, at least: they are asked every 2 s
    least_stall: float = 6.0  # a job makes no progress, however short its steps are
    link_idle: int = 4  # the system asks whether a silent machine is there
    link_probe: int = 2  # and asks again
    unread: int = 60  # sent data stays unread: a worker that computes reads nothing meanwhile
    handshake: float = 10.0  # a connection proves that it knows the key, or is dropped

    # Finding the cause of a failure
    cause_follows: float = 0.5  # the cause of a failure shows after its first victim
    agent_reports: float = 3.0  # the same, where an agent has to report it
    end_follows: float = 5.0  # a process ends after the first error that it causes: it may write a core file
    victims_settle: float = 2.0  # the other workers reach the instruction that needs the failed one
    snapshot_pause: float = 0.05  # between two snapshots of a job, which are then compared

    # Polling, where nothing tells
    driver_poll: float = 0.2  # the driver looks whether anything moves
    channel_poll: float = 0.5  # a wait for a message looks whether the other process is lost
    process_poll: float = 0.1  # a wait for a process looks whether it is stopped or gone
    agent_poll: float = 2.0  # the driver asks agents what they see: a call to another machine each
    agent_poll_soon: float = 0.1  # the same, once a failure is known
    warm_poll: float = 0.5  # the driver looks whether a starting agent is warm
    save_poll: float = 0.5  # a worker answers that it has not written its part of a checkpoint yet

    # Ranks of torchrun
    rank_away: float = 120.0  # a rank tries to reach rank 0 again: a network may need so long to recover
    rank_retry: float = 1.0  # and pauses so long between two tries
    rank_place: float = 5.0  # an agent that has connected says where it runs: its message is short
    rank_poll: float = 0.2  # a rank looks whether rank 0 has launched, or has ended
    ranks_leave: float = 10.0  # rank 0, which may hold the store, waits until the others know that it ends
    key_stale: float = 24 * 3600.0  # the key of a launch that was killed is removed


TIMEOUTS = Timeouts()
