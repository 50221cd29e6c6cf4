"""The suite of launchers on ranks of one GPU that use NCCL: `local`, and ranks as torchrun starts them."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from piper.compiler import Program, compile
from piper.recipe import load_recipe
from piper.run.launch import launch_inline
from piper.workers.transport.fork_server import ForkServer
from tests.gpu.rank_process import CORES
from tests.gpu.ranks import DEVICE, MARKS, NETWORK, launch_ranks
from tests.hosts.training import events
from tests.runtime.grid import job
from tests.workers import test_torchrun
from tests.workers.ranks import CELL, SHARE
from tests.workers.test_conformance import (  # noqa: F401  they run here too, with the ranks of this module
    CELLS,
    PAIR,
    Launcher,
    Same,
    Trained,
    test_a_batch_with_other_axes_is_refused_and_the_run_goes_on,
    test_an_exception_is_one_error_and_the_end,
    test_closing_kills_a_worker_that_does_not_answer,
    test_every_launcher_gives_the_same_bits,
    test_every_launcher_trains_on_several_shapes,
)
from tests.workers.test_torchrun import RECIPE, seen, torchrun

pytestmark = [*MARKS, pytest.mark.timeout(300), pytest.mark.xdist_group("ranks-launchers")]
CLOSE = partial(pytest.approx, rel=1e-9, abs=1e-12)  # float64


@pytest.fixture(scope="module")
def launcher(forks: ForkServer) -> Launcher:
    return partial(launch_ranks, forks=forks)


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    return {str(cell): compile(job(cell), device=DEVICE) for cell in (*CELLS.values(), PAIR)}


@pytest.fixture(scope="module")
def same() -> Same:
    return assert_same_numbers


def assert_same_numbers(left: Trained, right: Trained) -> None:
    """Compare runs of which one adds in another order."""
    for one, other in zip(left.results, right.results, strict=True):
        assert (one.loss, one.grad_norm) == CLOSE((other.loss, other.grad_norm))
    for these, those in ((left.state, right.state), (left.gradients, right.gradients)):
        assert these.keys() == those.keys()
        for name, value in these.items():
            off = (value.double().cpu() - those[name].double().cpu()).abs()
            assert bool((off <= 1e-9 * (1 + value.double().cpu().abs())).all()), (name, float(off.max()))


def test_other_numbers_are_noticed() -> None:
    state = {"x": torch.ones(3, dtype=torch.float64)}
    whole = Trained(results=[], state=state, gradients=state)
    assert_same_numbers(whole, whole)
    with pytest.raises(AssertionError):
        assert_same_numbers(whole, Trained(results=[], state={"x": state["x"] + 1e-7}, gradients=state))


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """What ranks of torchrun find: no multi-process service, which hands a worker's fault to every other client."""
    cores = ",".join(map(str, range(os.cpu_count() or 1)))
    asked = {**NETWORK, CORES: cores, SHARE: "nccl", "PIPER_RANKS_DEVICE": DEVICE}
    return {**test_torchrun.ENVIRONMENT, **asked}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("scripts")
    test_torchrun.run_scripts(folder, environment)
    yield folder


def test_a_script_of_torchrun_runs_unchanged(scripts: Path) -> None:
    first = seen(scripts, "all", 0)
    for name, value in of_threads().items():
        assert first[name] == nested(value), name
    test_torchrun.assert_refused(scripts)


def of_threads() -> dict[str, object]:
    return test_torchrun.of_one_process(compile(job(CELL), device=DEVICE))


def nested(value: object) -> object:
    """Return numbers in lists and tables, to be compared to rounding."""
    if isinstance(value, dict):
        return {name: nested(each) for name, each in value.items()}
    if isinstance(value, list):
        return [nested(each) for each in value]
    return CLOSE(value)


def test_a_worker_of_torchrun_dies(scripts: Path) -> None:
    test_torchrun.assert_died(scripts)


def test_the_command_line_under_torchrun_recovers(tmp_path: Path, environment: dict[str, str]) -> None:
    """A worker is killed in the middle of a step. Its rank forks it again, and no number changes."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE, encoding="utf-8")
    words = ("--out", "run", "--share", "nccl", "--device", DEVICE)
    done = torchrun("-m", "piper", "train", f"{recipe}:pair", *words, folder=tmp_path, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "killed").exists()
    assert events(tmp_path / "run") == [("failure", None), ("recovery", "memory")], done.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [[line["loss"], line["grad_norm"]] for line in map(json.loads, lines)]
    with launch_inline(compile(load_recipe(f"{recipe}:pair"), device=DEVICE)) as run:
        assert found == nested([[result.loss, result.grad_norm] for result in run.train()])
