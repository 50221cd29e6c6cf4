"""A process that is killed while it saves, again and again, at moments nobody chose."""

import random
import subprocess
import sys
from pathlib import Path
from time import sleep

import pytest

from piper.checkpoint.folder import latest
from piper.run.launch import launch, launch_inline
from tests.checkpoint.jobs import batches, equal_bits, program

KILLS = 10
PROGRAM = """
import sys
from pathlib import Path
from piper.checkpoint.folder import latest, step_path
from piper.run.launch import launch
from tests.checkpoint.jobs import batches, program

folder, on = Path(sys.argv[1]), sys.argv[2]
made, given = program("mlp", "dp2"), batches("mlp", 0, 8)
newest = latest(folder)
with launch(made, on, resume=newest) as run:
    step = 0 if newest is None else int(newest.name.split("-")[1])
    print("ready", flush=True)
    while True:
        run.step(given[step % 8])
        step += 1
        run.save(step_path(folder, step), wait=step % 3 == 0, keep=2)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("on", ["inline", "local"])
def test_a_killed_run_goes_on_from_where_it_was(on: str, tmp_path: Path) -> None:
    rng, steps = random.Random(0), [0]
    for _ in range(KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), on], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            sleep(rng.uniform(0, 0.6))
            process.kill()
        newest = latest(tmp_path)
        if newest is not None:
            steps.append(int(newest.name.split("-")[1]))
    assert steps == sorted(steps) and steps[-1] > KILLS
    newest = latest(tmp_path)
    made, given = program("mlp", "dp2"), batches("mlp", 0, 8)
    with launch_inline(made) as plain, launch(made, resume=newest) as run:
        for step in range(steps[-1]):
            plain.step(given[step % 8])
        assert equal_bits(run.state_dict(), plain.state_dict())
