"""Checkpoints of workers that are processes: the same files, and the same bits."""

from pathlib import Path

import pytest

from piper.checkpoint import folder
from piper.run.launch import On, launch, launch_inline, launch_local
from piper.runtime import setup
from piper.runtime.worker import Options
from tests.checkpoint.jobs import batches, equal_bits, program


@pytest.mark.timeout(120)
def test_processes_save_and_load_what_threads_do(tmp_path: Path) -> None:
    made, given = program("mlp", "pp2-dp2-zero3"), batches("mlp", 0, 3)
    with launch_local(made, Options()) as run:
        run.step(given[0])
        run.save(tmp_path / "step-1", data=[1, 2], wait=False)
        losses = [run.step(batch).loss for batch in given[1:]]
        run.save(tmp_path / "step-3", keep=1)
        state = run.state_dict()
        assert folder.latest(tmp_path) == tmp_path / "step-3"
        assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
        run.load(tmp_path / "step-3")
        assert equal_bits(run.state_dict(), state)
        with launch_inline(made) as threads:
            for batch in given[:1]:
                threads.step(batch)
            threads.save(tmp_path / "step-1")
        assert run.load(tmp_path / "step-1").step == 1
        assert [run.step(batch).loss for batch in given[1:]] == losses
        assert equal_bits(run.state_dict(), state)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("on", ["inline", "local"])
def test_a_run_that_resumes_builds_no_model(on: On, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = program("mlp", "pp2-dp2-zero3"), batches("mlp", 0, 2)
    with launch(made) as run:
        run.step(given[0])
        run.save(tmp_path / "a")
        loss, state = run.step(given[1]).loss, run.state_dict()

    def refuse(*_: object) -> None:
        raise AssertionError("the model is built")

    monkeypatch.setattr(setup, "build_model", refuse)
    with launch(made, on, resume=tmp_path / "a") as run:
        assert run.step(given[1]).loss == loss
        assert equal_bits(run.state_dict(), state)
