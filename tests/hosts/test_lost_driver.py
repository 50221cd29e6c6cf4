"""The driver's host is lost: the job ends everywhere in bounded time, says what to do, and --resume goes on."""

import time
from pathlib import Path

import pytest

from tests.hosts.machines import Host, hosts
from tests.hosts.training import ended, losses, on_one_device, steps, torchrun, wait_for_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LINGER = (
    180.0  # seconds in which Ray ends the actors of a driver whose host is lost: about 65 on an idle machine
)
OURS = "grep -lE 'piper|AgentProcess' /proc/[0-9]*/cmdline 2>/dev/null | grep -v self; ls -A /dev/shm; true"


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return on_one_device(tmp_path_factory.mktemp("alone") / "run")


def left(host: Host) -> str:
    """Return the processes of the job on a host, and what is in its shared memory."""
    return host.run("sh", "-c", OURS.replace("piper", "[p]iper").replace("AgentP", "[A]gentP"))


def assert_resumed(run: Path, wanted: list[float]) -> None:
    """Check that a run has each step once, with the numbers of one device."""
    assert steps(run) == [*range(1, 41)]
    assert losses(run) == pytest.approx(wanted, abs=1e-12)


def test_ranks_with_agents_say_that_rank_0_is_lost(tmp_path: Path, wanted: list[float]) -> None:
    run = tmp_path / "run"
    with hosts(3) as made:
        words = ("--spares", "1")
        processes = [torchrun(h, n, made[0], run, *words, job="copied", hosts=3) for n, h in enumerate(made)]
        wait_for_step(run, 12, processes[0])
        made[0].kill()
        ends = [ended(process) for process in processes[1:]]
        assert [left(host) for host in made[1:]] == ["", ""]
    for rank, (code, said) in enumerate(ends, 1):
        assert code != 0
        assert said.count(f"rank {rank} cannot reach rank 0, and tries for 120 s: ") == 1, said
        assert said.count("error: ") == 1, said
        assert (
            f"error: rank {rank}: rank 0 is gone, or cannot be reached any more\n"
            "  at:   10.99.0.1:29500\n"
            "  lost: the steps since the newest checkpoint: rank 0 drives, and no other rank takes its place\n"
            "  hint: look at what rank 0 says; start all ranks again with --resume to go on from that checkpoint\n"
        ) in said, said
    with hosts(2) as made:
        again = [torchrun(h, n, made[0], run, "--resume", job="copied") for n, h in enumerate(made)]
        assert [ended(process)[0] for process in again] == [0, 0]
    assert_resumed(run, wanted)


def test_actors_end_with_the_host_of_their_driver(tmp_path: Path, wanted: list[float]) -> None:
    """The head of Ray is on another host. There the run is taken up again."""
    pytest.importorskip("ray")
    from tests.hosts.test_ray import join, train

    run = tmp_path / "run"
    with hosts(3) as made:
        for host in made:
            join(host, made[0])
        driver = train(made[0], "copied", run, driver=made[1])
        wait_for_step(run, 12, driver)
        made[1].kill()
        until = time.monotonic() + LINGER
        while found := left(made[0]) + left(made[2]):
            assert time.monotonic() < until, found
            time.sleep(1)
        code, said = ended(train(made[0], "copied", run, "--resume"))
        assert code == 0, said
    assert_resumed(run, wanted)
