"""How processes ended, and whether there is one for each device."""

import pytest

from piper.errors import ConfigError
from piper.workers.processes import how
from piper.workers.rank_environment import RankEnvironment, check_size


@pytest.mark.parametrize(
    ("status", "said"),
    [(0, "ended with exit code 0"), (3, "ended with exit code 3"), (-9, "was killed by SIGKILL")],
)
def test_how_a_process_ended(status: int, said: str) -> None:
    assert how(status) == said


def test_a_world_has_one_process_for_each_device() -> None:
    world = RankEnvironment(rank=0, size=3, local=0, nearby=3, address="127.0.0.1", port=1)
    check_size(world, 3)
    for devices in (2, 4):
        with pytest.raises(ConfigError, match="there is not one process for each device"):
            check_size(world, devices)
