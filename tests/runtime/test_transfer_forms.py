"""Transfers between regions that lie unlike each other."""

import pytest

from tests.fuzz.case import Case, try_case
from tests.fuzz.models import Spec
from tests.fuzz.strategies import Layout

ROUTED = Spec(
    dim=4, blocks=("mlp", "experts", "mlp"), stages=(0, 1, 1), tokens=False, experts=4, top_k=2, layers=False,
    skip=False, tied_head=False, tied_blocks=False, frozen=(), head_inside=True, loss="weighted",
)  # fmt: skip
SETS = [([0], [0], [1]), ([0, 1], [0, 1], [2, 3]), ([0], [1, 2], [2, 0])]


@pytest.mark.parametrize("sets", SETS, ids=str)
def test_whole_experts_on_devices_of_their_own(sets: tuple[list[int], list[int], list[int]]) -> None:
    """All rows of a slice go there and back: their number does not depend on how they are routed."""
    filters = ("PP=0", "PP=1", 'PP=1, EP="*"')
    lines = [f"[replicate(at({at}), {devices})]" for at, devices in zip(filters, sets, strict=True)]
    lines.append("[split(at(), axis='MB', parts=2)]")
    layout = Layout(lines=tuple(lines), rows=8, clip=None, optimizer="torch.optim.SGD(params, lr=0.1)")
    assert try_case(Case(seed=0, spec=ROUTED, layout=layout)) is None
