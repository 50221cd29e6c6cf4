"""What is sent to a worker arrives as it was, and no more than it needs."""

import sys
from pathlib import Path

import pytest
import torch
from torch import fx, nn

from piper.plan.instr import Instr
from piper.plan.ops import Field
from piper.plan.plan import Plan, Plans
from piper.process.custom_operators import importable
from piper.recipe import import_file
from piper.workers.messages import BatchSlice, BatchSlicer
from piper.workers.transport.serialize import pack, unpack
from tests import warm


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(dtype)
    got = unpack(pack({"a": [value]}))
    assert isinstance(got, dict)
    assert got["a"][0].dtype == dtype
    assert torch.equal(got["a"][0], value)


def test_a_view_travels_without_its_storage() -> None:
    assert len(pack(torch.zeros(100_000)[:10])) < 1000


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(3.0))


def test_captured_code_is_not_traced_again() -> None:
    root = nn.Module()
    root.inner = Inner()
    graph = fx.Graph()
    x = graph.placeholder("x")
    scale = graph.get_attr("inner.scale")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, scale)),))
    code = unpack(pack(fx.GraphModule(root, graph)))
    assert callable(code)
    assert torch.equal(code(torch.ones(2))[0], torch.full((2,), 3.0))


def test_a_recipe_is_not_importable_and_the_package_is(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text("def double(x):\n    return 2 * x\n", encoding="utf-8")
    module = import_file(recipe)
    assert not importable(module.__name__)
    assert not importable("__main__")
    assert importable("piper.workers.serve")


RECIPE = """
import torch, piper
from torch import nn

class Sgd(torch.optim.SGD):  # a class of the recipe's own
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        with piper.annotate("PP"):
            x = self.a(x)
        with piper.annotate("PP"):
            return self.b(x)

def tiny():
    return piper.Job(
        model=Net,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": torch.ones(4, 4)}],
        strategy=[piper.place(piper.at(PP=0), [0]), piper.place(piper.at(PP=1), [1])],
        optimizer=lambda params: Sgd(params, lr=0.1),
    )
"""
RUN = """
from piper.compiler import compile
from piper.run.launch import launch
from piper.recipe import load_recipe
program = compile(load_recipe("{path}:tiny"))
for on in ("inline", "local"):
    with launch(program, on) as run:
        print(repr(run.step(next(iter(program.job.data())))))
"""


def test_a_recipe_trains_on_processes_without_a_guard_in_the_script(tmp_path: Path) -> None:
    recipe, script = tmp_path / "mine.py", tmp_path / "run.py"
    recipe.write_text(RECIPE, encoding="utf-8")
    script.write_text(RUN.format(path=recipe), encoding="utf-8")
    done = warm.run([sys.executable, script], capture_output=True, text=True, timeout=55)
    assert not done.stderr
    inline, local = done.stdout.splitlines()
    assert inline == local


def load(field: str, part: int) -> Instr:
    return Instr(
        op="load", node="load", stream="load", payload=Field(name=field, part=(("MB", part),), devices=(0, 1))
    )


def test_a_device_gets_its_own_rows() -> None:
    plans = Plans(
        plans=(
            Plan(devices=(0,), instrs=(load("x", 0), load("x", 1)), slots={}, residents={}),
            Plan(devices=(1,), instrs=(load("x", 1), load("y", 0)), slots={}, residents={}),
        ),
        comms={},
        buckets={},
        seed=1.0,
        weighted=False,
        cells=2,
        axes={"MB": 2},
    )
    batch = {"x": torch.arange(8), "y": torch.arange(8) + 10, "z": torch.arange(8)}
    cutter = BatchSlicer(plans)
    assert shown(cutter.cut(batch, 0)) == {"x": [(0, [0, 1, 2, 3])]}
    cut = cutter.cut(batch, 1)
    assert shown(cut) == {"x": [(6, [6, 7])], "y": [(4, [14, 15])]}
    assert len(cut["x"]) == 8
    assert cut["x"][6:8].tolist() == [6, 7]
    with pytest.raises(IndexError, match="rows 0:2 were not sent to this device"):
        cut["x"][0:2]


def shown(cut: dict[str, BatchSlice]) -> dict[str, list[tuple[int, list[int]]]]:
    return {name: [(low, rows.tolist()) for low, rows in part.parts] for name, part in cut.items()}
