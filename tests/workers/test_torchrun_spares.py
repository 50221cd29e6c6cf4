"""Ranks of torchrun more than devices: each has an agent that starts workers, or waits as a spare."""

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager
from functools import partial
from inspect import cleandoc
from pathlib import Path

import pytest

from piper.compiler import Program
from piper.errors import ConfigError, LaunchError
from piper.train.train_options import TrainOptions, check_options
from piper.workers.processes import ClosedError, ProcessStatus
from piper.workers.rank_agent import CODEC, AgentLostError, AgentPlace, RankAgent, ServedAgent, leave
from piper.workers.rank_environment import RankEnvironment, check_size
from piper.workers.rendezvous import DriverAddress
from piper.workers.torchrun import RankCalls, RemoteAgent, TorchrunStarter, over
from piper.workers.transport.channel import Channel, Listener, connect
from tests.hosts.training import events
from tests.runtime.grid import Cell, compiled
from tests.workers.bounds import set_timeouts
from tests.workers.family import family, free_port
from tests.workers.test_max_restarts import RECIPE, written
from tests.workers.test_torchrun import ENVIRONMENT

KEY = "k" * 32
PAIR = Cell(case="mlp", schedule="1f1b", dp=1)
WORLD = RankEnvironment(rank=2, size=3, local=2, nearby=3, address="127.0.0.1", port=1)


@contextmanager
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RemoteAgent, Channel, Listener]]:
    """Yield the agent of a rank that runs in a thread, the channel to it, and where it connects."""
    monkeypatch.setenv("PIPER_KEY", KEY)
    with closing(Listener("127.0.0.1", KEY.encode(), None, CODEC)) as listener:
        host, port = listener.address
        rank = ServedAgent(WORLD, DriverAddress(host=host, port=port, launch="", spares=True))
        made, channel = accepted(listener)
        yield made, channel, listener
    made.close()
    rank.thread.join(20)
    assert not rank.busy(), "it ends when the driver does not listen any more"


def accepted(listener: Listener) -> tuple[RemoteAgent, Channel]:
    arrived = listener.accept(20)
    assert arrived is not None
    name, channel = arrived
    assert (name, channel.recv()) == (2, AgentPlace(address="127.0.0.1", local=2))
    return RemoteAgent(partial(over, channel), partial(leave, channel)), channel


def test_calls_of_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may be an argument of another one. What fails, fails in the driver."""
    calls = RankCalls(WORLD)
    with agent(monkeypatch) as (made, _, _):
        assert calls.get(made.look.remote(), 20) == ProcessStatus(process=0)
        files = calls.get(made.keep.remote("owner", [0, 1], 1), 20)
        assert [*files] == [0, 1]
        image = bytes(range(9))
        calls.get(made.take.remote((0, 0, 0), image, 4), 20)
        moved = made.take.remote((1, 0, 0), made.image.remote((0, 0, 0), 9), 4)
        assert calls.get(moved, 20) is None
        assert calls.get(made.heads.remote([(1, 0, 0)], 9), 20) == [bytes(range(9))]
        with pytest.raises(AgentLostError, match=r"^KeyError: 7\n") as caught:
            calls.get(made.image.remote((7, 0, 0), 9), 20)
        assert "line" in caught.value.__notes__[0] and "in image" in caught.value.__notes__[0]
        with monkeypatch.context() as patched:
            patched.setattr(RankAgent, "room", lambda _: KEY.encode)
            with pytest.raises(AgentLostError, match=r"^TypeError: .* cannot be sent"):
                calls.get(made.room.remote(), 20)
        with pytest.raises(AgentLostError, match="agents do not answer"):
            calls.get(made.answer.remote("look", []), 20)
        assert calls.answers({3: made.look.remote()}, 20) == {3: ProcessStatus(process=0)}


def test_a_lost_agent_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = RankCalls(WORLD)
    with agent(monkeypatch) as (made, channel, listener):
        channel.end.shutdown(socket.SHUT_RDWR)
        assert calls.answers({0: made.look.remote()}, 20) == {}
        assert made.gone
        again, _ = accepted(listener)
        assert calls.answers({0: again.look.remote()}, 20) == {0: ProcessStatus(process=0)}
        assert calls.finished([made.look.remote()], 20), "a call that was lost has ended"
        hung = again.image.remote((0, 0, 0), 9)
        again.close()
        for lost in (hung, again.look.remote()):
            with pytest.raises((AgentLostError, CancelledError)):
                calls.get(lost, 20)


def test_a_rank_whose_driver_stays_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so at once, and what is lost once it gives up."""
    monkeypatch.setenv("PIPER_KEY", KEY)
    set_timeouts(monkeypatch, "rank_agent", rank_away=0.3, rank_retry=0.01)

    def unreachable(*_: object) -> Channel:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr("piper.workers.rank_agent.connect", unreachable)
    with pytest.raises(LaunchError) as caught:
        ServedAgent(WORLD, DriverAddress(host="127.0.0.1", port=1, launch="", spares=True)).wait()
    assert caplog.messages == [
        "rank 2 cannot reach rank 0, and tries for 0.3 s: [Errno 113] No route to host"
    ]
    assert str(caught.value) == cleandoc("""
        rank 2: rank 0 is gone, or cannot be reached any more
          at:   127.0.0.1:1
          lost: the steps since the newest checkpoint: rank 0 drives, and no other rank takes its place
          hint: look at what rank 0 says; start all ranks again with --resume to go on from that checkpoint
    """)


def test_processes_for_spares() -> None:
    check_size(WORLD, 2, 1)
    with pytest.raises(ConfigError) as caught:
        check_size(WORLD, 2, 2)
    assert str(caught.value) == cleandoc("""
        launch: there is not one process for each device and each spare
          processes: WORLD_SIZE=3
          devices:   2 in the plan
          spares:    --spares 2
          hint:      start 4 processes
    """)


def test_spares_of_processes_that_piper_starts() -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(TrainOptions(recipe="recipe.py:job", spares=1))
    assert str(caught.value) == cleandoc("""
        piper train: --spares 1, on local
          hint: spares are actors of Ray (--on ray --spares 1), or ranks of torchrun more than devices
    """)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_lost_worker_does_not_end_its_rank(tmp_path: Path) -> None:
    """A worker is killed, and one is stopped. torchrun does not notice, and the numbers are the same."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    run = tmp_path / "run"
    with family() as ranks:
        words = [sys.executable, "-m", "piper", "train", "recipe.py:pair", "--on", "inline", "--out", "alone"]
        alone = ranks.start(words, env=ENVIRONMENT, folder=tmp_path)
        assert alone.wait(200) == 0, alone.communicate(timeout=10)
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
        start += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        start += ["-m", "piper", "train", "recipe.py:pair", "--out", "run", "--spares", "1"]
        process = ranks.start(start, env=ENVIRONMENT, folder=tmp_path)
        for steps, number in ((6, signal.SIGKILL), (14, signal.SIGSTOP)):
            while len(written(run)) < steps and process.poll() is None:
                time.sleep(0.02)
            os.kill(ranks.forked("fork_server")[-1], number)
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
        assert ranks.members() == []
    assert written(run) == written(tmp_path / "alone"), "to the bit"
    assert events(run) == 2 * [("failure", None), ("recovery", "memory")]


@contextmanager
def starting(
    monkeypatch: pytest.MonkeyPatch, program: Program, nodes: list[int], *, absent: int | None = None
) -> Iterator[TorchrunStarter]:
    """Start from rank 0, with the other ranks as threads; `nodes`: the first rank of each one's machine."""
    monkeypatch.setenv("PIPER_KEY", KEY)
    world = [
        RankEnvironment(rank=n, size=len(nodes), local=n - node, nearby=1, address="127.0.0.1", port=1)
        for n, node in enumerate(nodes)
    ]
    ranks: list[ServedAgent] = []

    def publish(_: RankEnvironment, address: DriverAddress) -> None:
        ranks.extend(ServedAgent(one, address) for one in world[1:] if one.rank != absent)

    monkeypatch.setattr("piper.workers.torchrun.publish_address", publish)
    try:
        made = TorchrunStarter(program, world[0], True, len(nodes) - 2)
        yield made
        made.close()
    finally:
        for rank in ranks:
            rank.thread.join(20)
    assert not any(rank.busy() for rank in ranks)


def test_ranks_that_take_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rank can take a device. Where copies are kept apart, a machine takes those of one other machine."""
    with starting(monkeypatch, compiled(PAIR), [0, 0, 2, 2]) as made:
        assert [*made._bundles()] == [0, 1, 2, 3]
        made.ranks[1].actor.gone = True
        assert [*made._bundles()] == [0, 2, 3]
        made.ranks[2].actor.gone = made.ranks[3].actor.gone = True
        assert str(made._lacking()) == cleandoc("""
            launch: too few ranks are left
              needs: 2 ranks
              has:   1
              hint:  start all ranks again with --resume, to go on from a checkpoint; claim more spares
        """)
    monkeypatch.setattr("piper.workers.agent_starter.machines_of", lambda plans: ([(0,), (1,)], True))
    with starting(monkeypatch, compiled(PAIR), [0, 1, 2]) as made:
        assert [*made._bundles()] == [0, 1, 2]
    with pytest.raises(LaunchError) as caught, starting(monkeypatch, compiled(PAIR), [0, 0, 2, 2]):
        pass
    assert str(caught.value) == cleandoc("""
        launch: the cluster has too few machines to keep copies of the state apart
          needs: 4 machines, spares included, with 1 rank each
          has:   2 with that room
          hint:  add machines, or keep copies on other devices: protect(at(), copies=1, apart="device")
    """)


def test_a_rank_that_connects_and_says_nothing_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped just then."""
    set_timeouts(monkeypatch, "torchrun", rank_place=0.1)
    with starting(monkeypatch, compiled(PAIR), [0, 1, 2]) as made:
        known, came = made.ranks[1], list[Channel]()

        def arrive() -> None:
            came.append(connect(made.listener.address, KEY.encode(), 1, 20, CODEC))

        silent = threading.Thread(target=arrive, daemon=True)
        silent.start()
        assert made._accept(20.0)
        silent.join(20)
        with pytest.raises(ClosedError):
            came[0].recv()
        came[0].close()
        assert made.ranks[1] is known and not known.actor.gone
        assert made.ranks[1].actor.look.remote().result(20) == ProcessStatus(process=0)


def test_a_rank_whose_link_was_down_is_a_spare_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piper.workers.agent.MachineAgent.warm", lambda _: None)
    with starting(monkeypatch, compiled(PAIR), [0, 1, 2]) as made:
        lost, until = made.ranks[1], time.monotonic() + 20
        lost.actor.close()
        while made.ranks[1] is lost and time.monotonic() < until:
            made._hire()
            time.sleep(0.01)
        assert made.ranks[1].actor.look.remote().result(20) == ProcessStatus(process=0)
        assert made.bundles[1].agents == (made.ranks[1],)


def test_fewer_devices_need_no_whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of two ranks take a device each, or one of them takes both devices of a smaller layout."""
    monkeypatch.setattr("piper.workers.agent.MachineAgent.warm", lambda _: None)
    monkeypatch.setattr("piper.workers.agent_starter.machines_of", lambda plans: ([(0, 1)], True))
    set_timeouts(monkeypatch, "agent_starter", agents_settle=0.0)
    program = compiled(PAIR)
    with starting(monkeypatch, program, [0, 0, 2, 2]) as made:
        assert made.room() == 4 and len(made._agents()) == 2
        for rank in (2, 3):
            made.ranks[rank].actor.gone = True
        assert made.room() == 2
        assert made.versions is not None
        made.use(program, made.versions, [0, 1])
        assert made.room() == 2
        assert [agent.node for agent in made._agents().values()] == ["0", "0"]


def test_a_spare_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timeouts(monkeypatch, "torchrun", meeting=0.5)
    with (
        pytest.raises(LaunchError, match="rank 2 did not launch within"),
        starting(monkeypatch, compiled(PAIR), [0, 1, 2], absent=2),
    ):
        pass
