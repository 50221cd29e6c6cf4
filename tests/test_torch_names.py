"""`piper/` reads only private names of torch that the oldest and the newest supported version have."""

import ast
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from tests import torch_names
from tests.torch_names import (
    listed_names,
    longest,
    main,
    missing,
    names_of_piper,
    oldest_torch,
    private_names,
)

VERIFY = f"""
`make torch-names` verifies every private name of torch that piper/ reads with torch {oldest_torch()}, the oldest that
pyproject.toml allows, and writes tests/torch_names.txt. Commit that file with your change. Where it says that a name
is not there, find a way that both versions have, or ask with hasattr(owner, "name") and do without.
"""


def test_the_list_has_the_private_names_that_piper_reads() -> None:
    read, listed = names_of_piper(), listed_names()
    assert sorted(read - listed) == [], f"not in the list:{VERIFY}"
    assert sorted(listed - read) == [], f"in the list, and no longer read:{VERIFY}"


def test_this_torch_has_them() -> None:
    assert missing(listed_names()) == []


def names(code: str) -> AbstractSet[str]:
    return longest(private_names(ast.parse(code)))


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch\ntorch._foreach_add_(a, b)", "torch._foreach_add_"),
        ("import torch._dynamo as d\nd.reset()", "torch._dynamo.reset"),
        ("from torch._guards import tracing as t\nt()", "torch._guards.tracing"),
        (
            "from torch._library.simple_registry import singleton as s\ns.get(n).x",
            "torch._library.simple_registry.singleton.get",
        ),
        (
            "def f():\n    from torch._inductor import config\n    config.threads = 1",
            "torch._inductor.config.threads",
        ),
        (
            "from torch.nn.modules import module as m\nm._hooks.values()",
            "torch.nn.modules.module._hooks.values",
        ),
        ("import torch\naten = torch.ops.aten\naten._to_copy.default", "torch.ops.aten._to_copy.default"),
        ("import torch\nwith torch._dynamo.config.patch(rnn=1): pass", "torch._dynamo.config.rnn"),
        (
            "from torch.utils import checkpoint as c\nreplaced(c, '_check', f)",
            "torch.utils.checkpoint._check",
        ),
        ("import torch\ngetattr(torch._C, 'made')", "torch._C.made"),
    ],
)
def test_a_private_name_is_found(code: str, name: str) -> None:
    assert name in names(code)


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.add(a, b)\ntorch.__version__",
        "from piper import _inner\n_inner.value",
        "import torch\nhasattr(torch, '_new') and torch._new.part",
        "import torch\ngetattr(torch, '_new', None)",
    ],
)
def test_other_names_are_not_listed(code: str) -> None:
    assert names(code) == set()


def test_the_command_fails_where_a_name_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        torch_names, "names_of_piper", lambda: {"torch._ops.OpOverload", "torch._ops.NoSuchThing"}
    )
    assert main([]) == 1
    assert capsys.readouterr().err.endswith("has no torch._ops.NoSuchThing\n")


@pytest.mark.parametrize(("oldest", "writes"), [("0.1", False), (None, True)])
def test_only_the_oldest_torch_writes_the_list(
    oldest: str | None, writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    running = ".".join(torch.__version__.split(".")[:2])
    monkeypatch.setattr(torch_names, "oldest_torch", lambda: oldest or running)
    monkeypatch.setattr(torch_names, "names_of_piper", lambda: {"torch._ops.OpOverload"})
    monkeypatch.setattr(torch_names, "LIST", tmp_path / "names.txt")
    assert main(["--write"]) == (0 if writes else 1)
    assert (tmp_path / "names.txt").exists() is writes
    assert not writes or listed_names() == {"torch._ops.OpOverload"}
