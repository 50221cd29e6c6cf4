"""A program at the Python prompt and in a notebook: one line, a table, a page; and a run without a block."""

import gc
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper
from piper.compiler import Program
from piper.errors import ConfigError, WorkerError


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    found: Tensor = model(batch["x"]).square().mean()
    return found


def decayed(params: list[Tensor]) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in params if p.ndim == axes], "lr": axes / 10} for axes in (2, 1)]
    return torch.optim.SGD(groups, lr=0.1)


def batch() -> dict[str, Tensor]:
    return {"x": torch.ones(4, 3)}


@pytest.fixture(scope="module")
def program() -> Program:
    return piper.compile(
        piper.Job(
            model=lambda: nn.Linear(3, 2),
            loss=loss,
            data=lambda: [batch()],
            strategy=[piper.replicate(piper.at(), [0, 1], zero=1)],
            optimizer=decayed,  # type: ignore[arg-type]
        )
    )


def test_reprs_are_one_short_line(program: Program) -> None:
    assert repr(program).startswith("Program(2 cpu devices, 1 program, ")
    assert repr(program.plans).startswith("Plans(2 devices: Plan(devices 0,1, ")
    assert repr(program.simulate("h200")).startswith("Simulation(step ")
    assert all(len(repr(each)) < 200 for each in (program, program.plans, program.simulate(), program.view()))


def test_a_notebook_gets_a_table_and_a_page(program: Program, tmp_path: Path) -> None:
    shown = program._repr_html_()
    assert "<table>" in shown
    assert "<svg" in shown
    page = program.view()
    assert page._repr_html_().startswith("<iframe srcdoc=")
    saved = page.save(tmp_path / "page.html")
    assert saved.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    (tmp_path / "mine.html").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError):
        page.save(tmp_path / "mine.html")


def test_a_run_works_without_a_block_and_closes_itself(program: Program) -> None:
    gc.freeze()  # what the tests before have left is not looked through
    enabled = gc.isenabled()
    gc.disable()  # and no full collection takes the run out of sight
    run = piper.launch(program)
    assert run.step(batch()).loss > 0
    session = run.sessions.session
    assert session.open
    del run
    if enabled:
        gc.enable()
    gc.collect()
    assert not session.open
    run = piper.launch(program)
    run.close()
    run.close()
    with pytest.raises(WorkerError):
        run.step(batch())
    with piper.launch(program) as run:
        run.close()  # inside its block too


def test_a_run_that_fails_in_its_block_is_closed(program: Program) -> None:
    with pytest.raises(ZeroDivisionError), piper.launch(program) as run:
        session = run.sessions.session
        raise ZeroDivisionError
    assert not session.open


def test_rates_are_read_and_set(program: Program) -> None:
    with piper.launch(program) as run:
        assert [group["lr"] for group in run.optimizer] == [0.2, 0.1]
        before = run.state_dict()
        run.optimizer[0]["lr"] = 0.0
        run.optimizer[1]["lr"] = 0.5
        run.step(batch())
        after = run.state_dict()
        assert run.optimizer[1]["lr"] == 0.5
        assert torch.equal(before["weight"], after["weight"])
        assert not torch.equal(before["bias"], after["bias"])
        with pytest.raises(ConfigError) as error:
            run.optimizer[0]["rate"] = 0.1
    assert error.value.what == "the option 'rate' of an optimizer cannot be set to 0.1"


@pytest.mark.slow
def test_processes_let_their_rates_be_set(program: Program) -> None:
    with piper.launch(program, on="local") as run:
        run.optimizer[0]["lr"] = 0.25
        assert [group["lr"] for group in run.optimizer] == [0.25, 0.1]
        run.step(batch())
        assert run.optimizer_state("momentum_buffer") == {}


def test_public_modules_are_there_after_an_import() -> None:
    assert piper.data.TokenFile is not None
    assert piper.checkpoint.import_hf is piper.import_hf
    assert piper.checkpoint.export_hf is piper.export_hf
    assert piper.checkpoint.latest is not None
