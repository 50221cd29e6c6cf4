"""Groups of ZeRO on two machines with a slow link between them: it carries what the plan says, and one may be lost."""

from itertools import pairwise
from pathlib import Path

import pytest

import piper
from piper.ir.devices import Devices
from piper.plan.plan import Plans
from piper.recipe import load_recipe
from tests.hosts.machines import hosts
from tests.hosts.training import (
    RECIPE,
    ended,
    events,
    losses,
    on_one_device,
    steps,
    torchrun,
    wait_for_events,
    wait_for_step,
    written,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MACHINE = 2  # devices
RATE = "200mbit"

CONTROL = 1.01  # with batches, results and signs of life


def planned(plans: Plans) -> int:
    """Return the bytes that the devices of the first machine send to the other one in a step."""

    def crosses(group: Devices) -> bool:
        return len({device // MACHINE for device in group}) > 1

    return sum(
        ins.nbytes
        for plan in plans
        for device in plan.devices
        if device < MACHINE
        for ins in plan.instrs
        if ins.comm is not None
        and any(crosses(group) for group in plans.comms[ins.comm].groups if device in group)
    )


def sent(run: Path, job: str) -> list[int]:
    """Train over a slow link. Return the bytes that the first machine has sent in each step but the first few."""
    with hosts(2) as made:
        for host in made:
            host.slow(RATE)
        processes = [
            torchrun(host, number, made[0], run, job=job, each=MACHINE) for number, host in enumerate(made)
        ]
        assert [ended(process)[0] for process in processes] == [0, 0]
    return [int(str(b["sent"])) - int(str(a["sent"])) for a, b in pairwise(written(run, "traffic.jsonl")[2:])]


@pytest.mark.parametrize("job", ["groups", "owners"])
def test_the_link_carries_the_bytes_of_the_plan(tmp_path: Path, job: str) -> None:
    plans = piper.compile(load_recipe(f"{RECIPE}:{job}")).plans
    bytes_planned = planned(plans)
    assert bytes_planned > 1_000_000
    found = sent(tmp_path / "run", job)
    assert len(found) == 4
    for number in found:
        assert bytes_planned <= number < CONTROL * bytes_planned


def test_the_shards_of_a_lost_machine_come_from_the_memory_of_its_replica(tmp_path: Path) -> None:
    run, wanted = tmp_path / "run", on_one_device(tmp_path / "alone")
    plans = piper.compile(load_recipe(f"{RECIPE}:copied_groups")).plans
    assert not [ins for plan in plans for ins in plan.instrs if ins.op == "mirror"], (
        "the other machine has them"
    )
    with hosts(3) as made:
        processes = [
            torchrun(host, number, made[0], run, "--spares", "2", job="copied_groups", hosts=3, each=MACHINE)
            for number, host in enumerate(made)
        ]
        wait_for_step(run, 12, processes[0])
        made[1].kill()
        wait_for_events(run, 2, processes[0])
        wait_for_step(run, 40, processes[0])
    assert steps(run) == [*range(1, 41)]
    assert losses(run) == pytest.approx(wanted, abs=1e-12)
    assert events(run) == [("failure", None), ("recovery", "memory")]
