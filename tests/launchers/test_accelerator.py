"""Each worker of a machine sees one accelerator, which others may see too if there are not enough."""

import os

import pytest

from piper.workers.serve import crowded, take_one


@pytest.mark.parametrize(
    ("given", "local", "taken"), [("0", 0, "0"), ("0", 3, "0"), ("4,6", 1, "6"), ("4,6", 2, "4")]
)
def test_a_worker_takes_one_of_those_it_may_see(
    monkeypatch: pytest.MonkeyPatch, given: str, local: int, taken: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    take_one("cuda", local)

    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken


def test_more_workers_than_accelerators_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [crowded(workers) for workers in (1, 2, 3)] == [False, False, True]
