"""The list of mutants fits the tree: each edit can still be made, and each named test is still there."""

import argparse
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant, StaleError, load_mutants, missing_tests, mutated, source_of
from tests.mutation.run import Edit, Verdict, chosen, told

MUTANTS = load_mutants()
LEAST = 200
PACKAGES = (  # in which mutants there must be: all of them, and the modules of the top level that compute
    *(
        "capture",
        "checkpoint",
        "data",
        "directives",
        "ir",
        "run",
        "workers",
        "lower",
        "models",
        "plan",
        "proof",
        "runtime",
    ),
    *("schedules", "simulate", "train", "cli", "view", "compiler", "experts"),
)


def entry(old: str = "x", new: str = "y", *, nth: int | None = None, tests: tuple[str, ...] = ()) -> Mutant:
    return Mutant(id="one", file="piper/one.py", old=old, new=new, tests=tests, nth=nth)


def test_every_mutant_can_be_made() -> None:
    stale = []
    for mutant in MUTANTS:
        try:
            text = source_of(mutant).read_text(encoding="utf-8")
            changed = mutated(text, mutant)
        except StaleError as error:
            stale.append(str(error))
            continue
        assert changed != text, mutant.id
        compile(changed, mutant.file, "exec")
    assert not stale, "give these the text that their file has now:\n" + "\n".join(stale)


def test_every_mutant_names_tests_that_are_there() -> None:
    missing = {mutant.id: found for mutant in MUTANTS if (found := missing_tests(mutant))}
    assert not missing
    assert not [mutant.id for mutant in MUTANTS if not mutant.tests]


def test_there_are_enough_mutants_of_every_package() -> None:
    assert len(MUTANTS) >= LEAST
    assert not [name for name, count in Counter(mutant.id for mutant in MUTANTS).items() if count > 1]
    assert set(PACKAGES) <= {mutant.package for mutant in MUTANTS}
    equivalent = [mutant.id for mutant in MUTANTS if mutant.equivalent]
    assert len(equivalent) <= 0.05 * len(MUTANTS), "find mutants that a test can notice"


def test_an_edit_is_made_where_it_is_meant() -> None:
    assert mutated("a x b", entry()) == "a y b"
    assert mutated("x x x", entry(nth=2)) == "x y x"
    for text, nth in (("a b", None), ("x x", None), ("x", 2)):
        with pytest.raises(StaleError):
            mutated(text, entry(nth=nth))


def test_a_file_that_has_moved_is_found_by_its_text(tmp_path: Path) -> None:
    moved = tmp_path / "piper" / "two" / "one.py"
    moved.parent.mkdir(parents=True)
    moved.write_text("a x b")
    assert source_of(entry("a x"), tmp_path) == moved
    (moved.parent / "copy.py").write_text("a x b")
    for old in ("a x", "nowhere"):
        with pytest.raises(StaleError):
            source_of(entry(old), tmp_path)


def test_an_edit_is_taken_back_with_its_bytecode(tmp_path: Path) -> None:
    path, cache = tmp_path / "piper" / "one.py", tmp_path / "piper" / "__pycache__" / "one.cpython.pyc"
    cache.parent.mkdir(parents=True)
    path.write_text("x")
    os.utime(path, ns=(10**9, 10**9))
    cache.write_bytes(b"code")
    edit = Edit(entry(), tmp_path)
    assert path.read_text() == "y" and not cache.exists()
    edit.undo()
    assert (path.read_text(), path.stat().st_mtime_ns, cache.read_bytes()) == ("x", 10**9, b"code")


def test_a_test_that_is_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one() -> None: ...\n")
    given = ("test_a.py", "test_a.py::test_one[3]", "test_a.py::test_two", "test_b.py")
    assert missing_tests(entry(tests=given), tmp_path) == ["test_a.py::test_two", "test_b.py"]


@pytest.mark.parametrize(
    ("killed", "survived", "equivalent", "enough"),
    [(95, 0, 5, True), (94, 0, 6, False), (99, 1, 0, False), (20, 0, 0, True)],
)
def test_survivors_need_a_reason_and_may_not_be_many(
    killed: int, survived: int, equivalent: int, enough: bool
) -> None:
    verdicts = [Verdict(id="k", file="f", fate="killed")] * killed
    verdicts += [Verdict(id="s", file="f", fate="survived")] * survived
    verdicts += [Verdict(id="e", file="f", fate="equivalent", by="it is the same")] * equivalent
    text, found = told(verdicts)
    assert found is enough
    assert text.startswith(f"{killed} of {len(verdicts)} mutants killed")
    assert text.count("equivalent: e in f: it is the same") == equivalent


def test_mutants_are_chosen_by_id_and_by_package() -> None:
    asked = argparse.Namespace(only=None, package=["plan"], since=None)
    assert {mutant.package for mutant in chosen(MUTANTS, asked)} == {"plan"}
    asked = argparse.Namespace(only=[MUTANTS[0].id], package=None, since=None)
    assert chosen(MUTANTS, asked) == MUTANTS[:1]
