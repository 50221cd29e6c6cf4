"""`piper selftest` passes where everything is right, and fails, with the reason, where something is wrong."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from piper.cli import main
from piper.errors import ConfigError
from piper.selftest import selftest as module
from piper.selftest.compositions import compositions
from piper.selftest.peers import PEERS, Comparison, Peer
from piper.selftest.rank_process import Processes
from piper.selftest.selftest import PARTS, Machine, run_part, selftest
from piper.selftest.selftest_page import MARK, Part, ResultRow
from piper.workers.processes import gone
from piper.workers.transport.fork_server import ForkServer

WRONG = "tests.selftest.wrong_sums"
PAIR = 2


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that the self-test starts: fork servers, which end with all that they forked."""
    pids: list[int] = []

    def start(module: str) -> ForkServer:
        forks = ForkServer(module)
        pids.append(forks.server)
        return forks

    monkeypatch.setattr(module, "ForkServer", start)
    return pids


@pytest.fixture
def wrong_machine() -> Iterator[Machine]:
    """Two ranks whose sums are wrong."""
    with closing(ForkServer(WRONG)) as forks, closing(Processes(forks, PAIR, 60.0)) as processes:
        yield Machine(devices=PAIR, kind="cpu", compiled=False, forks=forks, processes=processes)


def run_cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["piper", "selftest", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_a_machine_that_is_right_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], started: list[int]
) -> None:
    page = tmp_path / "page.md"
    words = ["--devices", "2", "--device", "cpu", "--out", str(page)]
    words += [word for part in ("versions", "links", "collectives") for word in ("--only", part)]
    assert run_cli(monkeypatch, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["place"] == "2 ranks on the host, over gloo"
    assert [part["title"] for part in found["parts"]] == ["Versions", "Links", "Collectives"]
    assert [row["name"] for row in found["parts"][1]["rows"]] == ["0 to 1", "1 to 0"]
    # It has no bandwidth where a busy machine took as long for few bytes as for many.
    assert all(row["latency_s"] >= 0 and row.get("bytes_per_s", 1) > 0 for row in found["parts"][1]["rows"])
    written = page.read_text(encoding="utf-8")
    assert written.startswith(MARK) and written.endswith("**Passed: 7 checks, none failed**\n")
    assert "- kill: not asked for\n" in written
    assert len(started) == 1 and all(map(gone, started)) and [*tmp_path.iterdir()] == [page]


def test_wrong_sums_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "selftest", partial(selftest, process=WRONG))
    page = tmp_path / "page.md"
    words = ["--devices", "2", "--device", "cpu", "--only", "collectives", "--out", str(page)]
    assert run_cli(monkeypatch, *words) == 1
    written = page.read_text(encoding="utf-8")
    assert written == capsys.readouterr().out
    assert written.endswith(
        "**FAILED: 2 of 7 checks: Collectives: all_reduce; Collectives: reduce_scatter**\n"
    )
    assert "all_reduce: all_reduce float64 1 all: rank 0 gets" in written


def test_a_composition_that_is_wrong_fails(wrong_machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compositions", lambda devices: compositions(devices)[:1])
    (row,) = run_part(*PARTS["compositions"], wrong_machine).rows
    assert row.ok is False and row.why.startswith("Not the same numbers:")


def test_a_part_that_raises_is_a_failure_with_its_message(wrong_machine: Machine) -> None:
    def rows(machine: Machine) -> Iterator[ResultRow]:
        yield ResultRow(name="first", ok=True)
        machine.processes.call(machine.processes.meet(PAIR, 1.0), lambda rank: 1 // rank.number)

    part = run_part(Part(title="Broken", first="what", columns={}), rows, wrong_machine)
    assert [row.ok for row in part.rows] == [True, False] and not part.ok
    assert "ZeroDivisionError" in part.rows[1].why and "rank 1: done" in part.rows[1].why


def test_other_losses_fail_and_one_peer_that_raises_does_not_stop_the_next(
    wrong_machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([1e-7, 1e-3])

    def compare(peer: Peer, *_: object) -> Comparison:
        if peer.name == "fsdp2":
            raise OSError("gone")
        return Comparison(ours=[1.0, 2.0, 3.0], theirs=[4.0], apart=next(found))

    monkeypatch.setattr(module, "compare", compare)
    monkeypatch.setattr(module, "PEERS", PEERS[:3])
    part = run_part(*PARTS["torch"], wrong_machine)
    assert [row.ok for row in part.rows] == [True, False, False]
    assert part.rows[0].figures == {"piper_s": 2.0, "torch_s": 4.0, "ratio": 0.5, "difference": 1e-7}
    assert [row.why for row in part.rows[1:]] == ["OSError: gone", "the losses of both sides differ"]
    assert "| DistributedDataParallel | 2 s | 4 s | 0.50x | 1.0e-07 | passed |" in [*part.markdown()]


def test_losses_that_differ_after_a_kill_fail(
    wrong_machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"recovered_s": 2.0, "step_s": 0.1, "difference": 1e-3}
    monkeypatch.setattr(module, "killed_and_recovered", lambda devices, kind: figures)
    assert not run_part(*PARTS["kill"], wrong_machine).ok


@pytest.mark.parametrize(
    ("gpus", "place"), [(1, "4 ranks on 1 GPU, by NCCL over sockets"), (4, "4 ranks on 4 GPUs, by NCCL")]
)
def test_the_page_says_what_ranks_share(
    wrong_machine: Machine, monkeypatch: pytest.MonkeyPatch, gpus: int, place: str
) -> None:
    for name in ("piper.run.launch.accelerators", "piper.workers.serve.accelerators"):
        monkeypatch.setattr(name, lambda: gpus)
    machine = replace(wrong_machine, devices=4, kind="cuda")
    assert (machine.place, machine.apart) == (place, gpus == 4)
    assert machine.processes.meet(4, 1.0).apart is False  # processes of a host


def test_a_worker_that_is_killed_is_replaced() -> None:
    (part,) = selftest(PAIR, device="cpu", only=["kill"]).parts
    (row,) = part.rows
    assert row.ok and row.name == "SIGKILL to device 1 of 2", row
    assert 0 < float(row.figures["step_s"]) < float(row.figures["recovered_s"]) < 60


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no part 'link'"):
        selftest(only=["link"])
    other = tmp_path / "notes.md"
    other.write_text("mine", encoding="utf-8")
    assert run_cli(monkeypatch, "--out", str(other)) == 2
    assert run_cli(monkeypatch, "--devices", "1") == 2
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "::1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="belongs to a job of torchrun"):
        selftest()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_passes_on_the_host() -> None:
    page = selftest(device="cpu")
    sys.stdout.write(page.markdown())
    assert page.ok, page.verdict
    assert [len(part.rows) for part in page.parts][1:] == [4, 7, 10, 1, 4]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("devices", [2, 3])
def test_other_numbers_of_devices(devices: int) -> None:
    page = selftest(devices, device="cpu")
    assert page.ok, page.verdict
