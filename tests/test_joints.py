"""Compilations of a test run share the traces of equal chunks, and of no others."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tests.joints
from piper.capture.autodiff import differentiate as autodiff
from piper.capture.autodiff.differentiate import differentiate
from piper.capture.autodiff.joint import Joint, trace_joint
from piper.capture.trace.trace import trace
from tests import zoo
from tests.joints import SharedJoints, StoredJoints, remove_unused

pytestmark = pytest.mark.usefixtures("own_captures")


class Sine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x))


class Cosine(Sine):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(self.layer(x))


class SineElsewhere(Sine):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x))


def traces(*models: Callable[[], nn.Module], rows: int = 4, stored: StoredJoints | None = None) -> int:
    """Return how many chunks a new process would trace to differentiate some models of one chunk each."""
    with (
        patch.object(autodiff, "trace_joint", SharedJoints(stored=stored).trace),
        patch.object(tests.joints, "trace_joint", wraps=trace_joint) as traced,
    ):
        for model in models:
            differentiate(trace(model, zoo.regression, zoo.vectors(8, 0), rows))
    return traced.call_count


def test_equal_models_are_traced_once() -> None:
    assert traces(Sine, Sine, lambda: Sine()) == 1


def test_other_operations_and_the_same_operations_on_other_lines_are_traced() -> None:
    assert traces(Sine, Cosine, SineElsewhere) == 3


def test_this_run_shares_traces() -> None:
    assert isinstance(vars(autodiff)["trace_joint"].__self__, SharedJoints)


@torch.library.custom_op("tests_joints::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, gradient: twice(gradient))


class Twice(Sine):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = twice(self.layer(x))
        return result


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredJoints:
    monkeypatch.setattr(tests.joints, "LONG", 0.0)
    return StoredJoints(folder=tmp_path / "joints")


def test_another_process_reads_what_one_has_traced(stored: StoredJoints) -> None:
    assert [traces(Sine, Cosine, stored=stored) for _ in range(2)] == [2, 0]
    assert len([*stored.folder.iterdir()]) == 2
    assert traces(Sine, rows=2, stored=stored) == 1


def test_a_trace_that_was_read_is_the_one_that_was_written(stored: StoredJoints) -> None:
    """Node by node: operations, arguments, sizes, lines and shared memory."""

    def described(joint: Joint) -> list[str]:
        nodes = [*joint.graph.nodes]
        numbers: dict[int, int] = {}
        for node in nodes:
            for memory in node.meta.get("memory", ()):
                numbers.setdefault(memory, len(numbers))
        places = [{kind: dict(getattr(joint, kind)) for kind in tests.joints.NODES}, list(joint.outputs)]
        return [
            str(places),
            *(
                f"{node.format_node()} {node.meta.get('val')} {node.meta.get('stack_trace')} "
                f"{node.meta.get('partitioner_tag')} {[numbers[m] for m in node.meta.get('memory', ())]}"
                for node in nodes
            ),
        ]

    found = zoo.case("convnet")
    joints: list[list[str]] = []
    for _ in range(2):
        shared = SharedJoints(stored=stored)
        with patch.object(autodiff, "trace_joint", shared.trace):
            differentiate(trace(found.model, found.loss, found.batch(8, 0), 2))
        joints.append([line for joint in shared.known.values() for line in described(joint)])
    assert joints[0] == joints[1] and len(joints[0]) > 50


def test_a_stored_trace_serves_equal_chunks_on_other_lines_and_names_their_lines(
    stored: StoredJoints,
) -> None:
    def lines(model: type[Sine]) -> set[int]:
        shared = SharedJoints(stored=stored)
        with patch.object(autodiff, "trace_joint", shared.trace):
            differentiate(trace(model, zoo.regression, zoo.vectors(8, 0), 4))
        stacks = [
            str(node.meta.get("stack_trace")) for joint in shared.known.values() for node in joint.graph.nodes
        ]
        return {int(line) for stack in stacks for line in re.findall(r"test_joints.py\", line (\d+)", stack)}

    there = lines(SineElsewhere)
    assert traces(Sine, stored=stored) == 0
    first = Sine.forward.__code__.co_firstlineno
    assert there == {SineElsewhere.forward.__code__.co_firstlineno + 1} and lines(Sine) == {first + 1}


def test_what_calls_an_operation_of_a_test_is_not_stored(stored: StoredJoints) -> None:
    """Its derivative may be another one in the next run."""
    assert [traces(Twice, stored=stored) for _ in range(2)] == [1, 1]
    assert not stored.folder.exists()


def test_traces_of_other_sources_are_removed_after_a_week(tmp_path: Path) -> None:
    for name, written in (("old", 0), ("new", 8 * 24 * 3600)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (written, written))
    remove_unused(tmp_path, 9 * 24 * 3600)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
