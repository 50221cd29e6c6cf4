"""Parameters and buffers may have any name that torch takes: compiled, written down, trained, saved, checked."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from piper.capture.trace.annotate import annotate
from piper.check.check import check
from piper.directives import Directive, replicate, split
from piper.ir.select import at
from piper.plan.text import read_plans, show_plans
from piper.run.launch import launch_inline
from tests import plain, zoo
from tests.runtime.against_plain import PP2_DP2, difference, program

REPLICAS: list[Directive] = [replicate(at(), [0, 1]), split(at(), parts=2)]
STRATEGIES = {"pipeline": PP2_DP2, "replicas": REPLICAS}
NAMES = [
    *("a b", "a  b", " a ", "x | y", "x=1", "reads=1", "a@0,1", "PP=0/0", "grad", "param", "a:3", "#1"),
    *("it's", 'say "a"', "é", "a\tb", "two\nlines", "\u2028", "a\\b", "%7C", "50%", "<g>", "->", "+a+"),
]
CLASHING = ["w[0]", "w[MB=0]", "][", "buffer", "constant", "batch"]  # with how ids of slots are written


class Named(nn.Module):
    """For each name a parameter, one in a dict and a buffer.

    tied: both stages read the parameters, so that they are named in the plan.
    """

    def __init__(self, names: Sequence[str], *, tied: bool) -> None:
        super().__init__()
        self.names, self.tied = names, tied
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(16) / 4))
        self.table = nn.ParameterDict({name: nn.Parameter(torch.randn(16) / 4) for name in names})
        self.kept = nn.Module()
        for name in names:
            self.kept.register_buffer(name, torch.rand(16))
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def own(self, name: str) -> Tensor:
        found = self._parameters[name]
        assert found is not None
        return found

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            h = self.first(x)
            for name in self.names:
                h = h + self.table[name] * self.kept._buffers[name] + self.own(name)
            h = torch.tanh(h)
        with annotate("PP"):
            for name in self.names if self.tied else ():
                h = h + self.own(name)
            result: Tensor = self.last(h)
        return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_names(strategy: str, tied: bool) -> None:
    def model() -> nn.Module:
        return Named(NAMES, tied=tied)

    assert difference(model, zoo.regression, zoo.vectors, STRATEGIES[strategy]) < 1e-12


def test_names_that_clash_in_one_region() -> None:
    def model() -> nn.Module:
        return Named(CLASHING, tied=False)

    assert difference(model, zoo.regression, zoo.vectors) < 1e-12


@pytest.mark.parametrize("name", CLASHING)
def test_names_that_clash_in_several_regions(name: str, tmp_path: Path) -> None:
    def model() -> nn.Module:
        return Named([name], tied=True)

    assert difference(model, zoo.regression, zoo.vectors, REPLICAS) < 1e-12
    saved_and_checked([name], tmp_path, REPLICAS)


def test_plans_with_any_name_survive_their_text() -> None:
    names = [*NAMES, *CLASHING]
    plans = program(lambda: Named(names, tied=True), zoo.regression, zoo.vectors).plans
    assert read_plans(show_plans(plans)) == plans


def test_names_in_checkpoints_and_checks(tmp_path: Path) -> None:
    saved_and_checked(NAMES, tmp_path, PP2_DP2)


def saved_and_checked(names: Sequence[str], folder: Path, strategy: Sequence[Directive]) -> None:
    compiled = program(lambda: Named(names, tied=True), zoo.regression, zoo.vectors, strategy)
    batches = [zoo.vectors(16, seed) for seed in range(2)]
    with launch_inline(compiled) as run:
        run.step(batches[0])
        run.save(folder / "saved")
        run.step(batches[1])
        after = run.state_dict()
        assert set(names) < set(after)
    with launch_inline(compiled) as run:
        run.load(folder / "saved")
        run.step(batches[1])
        assert plain.largest_difference(after, run.state_dict()) == 0.0
    assert check(compiled, launch_inline, batches).ok
