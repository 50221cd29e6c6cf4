"""What a run keeps for its page: the same page comes of it, and only of the plans it was kept for."""

import json
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path

import pytest

from piper.errors import ConfigError
from piper.plan.text import read_plans, show_plans
from piper.simulate.measured import prices_of
from piper.simulate.profile import fingerprint
from piper.view.provenance import FILE, Provenance, Subject, read_background, show_background, subject_from
from piper.view.report import page
from tests.chain import chain
from tests.view.scenes import again, deep, demo


def background(subject: Subject, stages: int, experts: int) -> Provenance:
    """What stands behind a subject that was made of a chain."""
    return Provenance(
        title=subject.title,
        outline=chain(stages, experts=experts),
        orderings=subject.orderings,
        strategy=subject.strategy,
        origins=subject.origins,
        temporal=subject.temporal,
        source=subject.source,
        source_name=subject.source_name,
    )


def keep(subject: Subject, stages: int, folder: Path) -> Path:
    """Let a folder be that of a subject's run."""
    (folder / "plan.txt").write_text(show_plans(subject.plans))
    (folder / FILE).write_text(show_background(background(subject, stages, 4), subject.plans))
    return folder


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of a run of `demo`."""
    return keep(demo(), 4, tmp_path)


@pytest.mark.parametrize(("subject", "stages"), [(demo, 4), (again, 2)])
def test_the_page_is_the_same_to_the_last_byte(
    subject: Callable[[], Subject], stages: int, tmp_path: Path
) -> None:
    folder = keep(subject(), stages, tmp_path)
    plans = read_plans((folder / "plan.txt").read_text())
    found = read_background(folder, plans)
    assert found is not None
    assert page(subject_from(found, plans, prices_of("h100", None))) == page(subject())


def test_measured_costs_know_the_model(kept: Path) -> None:
    found = read_background(kept, demo().plans)
    assert found is not None
    assert fingerprint(found.outline) == fingerprint(chain(4, experts=4))


def test_it_is_smaller_than_the_plan() -> None:
    text = show_background(background(deep(), 16, 0), deep().plans)
    assert len(text) < len(show_plans(deep().plans)) / 3


def test_a_folder_that_keeps_nothing_or_something_of_other_plans(kept: Path, tmp_path: Path) -> None:
    assert read_background(kept, deep().plans) is None
    (kept / FILE).unlink()
    assert read_background(kept, demo().plans) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"piper_view":2}', "it is of form 2, not 1"),
        ("{}", "KeyError: 'piper_view'"),
        ("[]", "TypeError: list indices must be integers or slices, not str"),
        ("", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_a_file_that_is_none(kept: Path, text: str, why: str) -> None:
    (kept / FILE).write_text(text)
    with pytest.raises(ConfigError) as error:
        read_background(kept, demo().plans)
    assert str(error.value) == cleandoc(f"""
        {kept / FILE}: what this run kept for its page cannot be read
          why:  {why}
          hint: a run that is trained now writes it; `piper view file.py:function` shows the recipe
    """)


def test_a_file_that_was_changed(kept: Path) -> None:
    told = json.loads((kept / FILE).read_text())
    (kept / FILE).write_text(json.dumps({**told, "temporal": [[0, 10**6, 0]]}))
    with pytest.raises(ConfigError, match="why:  IndexError"):
        read_background(kept, demo().plans)
