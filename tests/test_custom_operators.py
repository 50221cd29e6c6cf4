"""Which module defines an operator: a worker imports it before it runs captured code."""

import sys
from collections.abc import Callable
from pathlib import Path
from pickle import PicklingError

import pytest
import torch
from torch import Tensor, fx

from piper.capture.compile.operators import mm_into
from piper.process.custom_operators import check_importable, modules_of
from piper.workers.transport.serialize import pack, unpack
from tests import warm
from tests.capture import test_fallback

LIBRARY = torch.library.Library("piper_tests_library", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")


def _fake_twice(x: Tensor) -> Tensor:
    return torch.empty_like(x)


torch.library.register_fake("piper_tests_library::twice", _fake_twice, lib=LIBRARY)


def graph_of(operator: Callable[..., object]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(operator, (graph.placeholder("x"),)))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("operator", "module"),
    [
        (torch.ops.piper_tests.square, {"tests.capture.test_fallback"}),
        (torch.ops.piper_tests.square.default, {"tests.capture.test_fallback"}),
        (torch.ops.piper_tests_library.twice, {"tests.test_custom_operators"}),
        (torch.ops.piper_tests_library.twice.default, {"tests.test_custom_operators"}),
        (mm_into, {"piper.capture.compile.operators"}),
        (torch.ops.aten.relu.default, set()),
        (torch.ops.aten.relu, set()),
        (torch.relu, set()),
    ],
    ids=["own", "own.default", "library", "library.default", "ours", "aten.default", "aten", "function"],
)
def test_a_module_of_an_operator(operator: Callable[..., object], module: set[str]) -> None:
    assert modules_of(graph_of(operator).graph) == module


def test_an_operator_in_another_language_belongs_to_the_package_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = torch.library.Library("piper_tests_package", "DEF")
    library.define("once(Tensor x) -> Tensor")
    graph = graph_of(torch.ops.piper_tests_package.once.default).graph
    assert modules_of(graph) == set()
    monkeypatch.setitem(sys.modules, "piper_tests_package", test_fallback)
    assert modules_of(graph) == {"piper_tests_package"}


def test_code_travels_with_the_modules_of_its_operators() -> None:
    sent = pack(graph_of(torch.ops.piper_tests.square))
    assert b"tests.capture.test_fallback" in sent
    code = unpack(sent)
    assert callable(code) and code(torch.tensor([3.0])).tolist() == [9.0]


def test_an_operator_that_no_worker_can_define_is_refused() -> None:
    check_importable(["tests.capture.test_fallback"])
    with pytest.raises(PicklingError, match=r"^__main__ defines an operator, and no worker can import it$"):
        check_importable(["tests.capture.test_fallback", "__main__"])


def test_an_installed_package_is_importable_from_anywhere(tmp_path: Path) -> None:
    program = "from piper.process.custom_operators import importable; assert importable('piper.experts')"
    done = warm.run(
        [sys.executable, "-c", program], cwd=tmp_path, timeout=50, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
