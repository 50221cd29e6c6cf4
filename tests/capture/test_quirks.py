"""Each workaround says which version of which library it is for, and goes when no supported version needs it."""

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._decomp.decompositions_for_rng import PhiloxState, PhiloxStateTracker
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

import piper
from piper.capture.autodiff import differentiate
from piper.capture.autodiff.joint import trace_joint
from piper.compiler import compile
from tests.torch_names import oldest_torch

QUIRKS = Path(__file__).parents[2] / "piper" / "capture" / "quirks"
FILES = sorted(path for path in QUIRKS.glob("*.py") if path.name != "__init__.py")
AROUND = re.compile(r"^Works around: (torch|transformers) \d+\.\d+\. ", re.MULTILINE)
ENDS = re.compile(
    r"^Not needed from: (?:(?P<library>torch|transformers) (?P<version>\d+\.\d+)|no version yet)\.$", re.M
)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workaround_names_its_library_and_the_version_that_ends_it(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    around, ends = AROUND.search(said), ENDS.search(said)
    assert around, "say `Works around: torch 2.11. ...`"
    assert ends, "say `Not needed from: torch 2.13.` or `Not needed from: no version yet.`"
    if ends["library"] == "torch":
        assert numbers(ends["version"]) > numbers(oldest_torch()), "no supported version needs it: delete it"


def test_there_are_workarounds() -> None:
    assert len(FILES) >= 10


def test_only_workarounds_replace_functions_of_dynamo() -> None:
    """A patch of another library is a workaround; those of Inductor's clock stand with what they measure."""
    users = {
        path.relative_to(QUIRKS.parent).as_posix()
        for path in QUIRKS.parent.rglob("*.py")
        if "process.attributes import replaced" in path.read_text(encoding="utf-8")
    }
    assert {user for user in users if not user.startswith("quirks/")} == {"compile/tuning.py"}


@pytest.mark.usefixtures("own_captures")
def test_a_capture_replaces_no_methods_of_modules_and_makes_no_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each replaced method takes the longer the more graphs a process has."""
    made: Counter[str] = Counter()
    traces: list[object] = []
    revert: Callable[..., None] = _symbolic_trace._PatchedFnSetAttr.revert
    seed = torch.tensor

    def reverted(patch: _symbolic_trace._PatchedFnSetAttr) -> None:
        made["methods"] += 1
        revert(patch)

    def reset(state: PhiloxState) -> None:
        made["states"] += 1
        state.seed = state.base_offset = seed(())

    def traced(*given: object, **options: object) -> object:
        traces.append(trace_joint(*given, **options))  # type: ignore[arg-type]
        return traces[-1]

    monkeypatch.setattr(_symbolic_trace._PatchedFnSetAttr, "revert", reverted)
    monkeypatch.setattr(PhiloxState, "reset", reset)
    monkeypatch.setattr(differentiate, "trace_joint", traced)  # not one that is known
    job = piper.Job(
        model=lambda: nn.Linear(4, 4),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": torch.zeros(2, 4)}],
        strategy=[piper.shard(piper.at(), [0, 1], axis="TP", weights={"weight|bias": 0})],
    )
    compile(job, device="cpu")
    assert traces and not made
    make_fx(torch.sin)(torch.ones(2))
    PhiloxStateTracker.reset()
    assert made["methods"] and made["states"], "torch does neither any more"
