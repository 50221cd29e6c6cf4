"""`make test` leaves out what the list names, and nothing that is not there."""

from pathlib import Path

import pytest

from tests.extended import ROOT, extended, listed

pytest_plugins = ["pytester"]


def test_the_list_names_tests_that_exist() -> None:
    for file, tests in listed().items():
        assert (ROOT / file).exists(), f"tests/extended.toml names {file}, which is not there"
        text = (ROOT / file).read_text(encoding="utf-8")
        assert [name for name in tests if f"def {name}(" not in text] == [], file


def test_what_is_kept_and_what_is_left_out() -> None:
    left_out = extended()
    assert left_out("tests/lower/test_any_strategy.py::test_every_strategy_is_right_or_refused")
    assert left_out("tests/runtime/test_modules.py::test_recurrent_networks[LSTM]")
    assert not left_out("tests/runtime/test_modules.py::test_recurrent_networks[RNN]")
    assert not left_out("tests/runtime/test_modules.py::test_another")
    assert left_out("tests/docs/test_blocks.py::test_a_page_does_what_it_says[docs/tutorial.md]")
    assert not left_out("tests/docs/test_blocks.py::test_a_page_does_what_it_says[README.md]")
    assert not left_out("tests/test_extended.py::test_what_is_kept_and_what_is_left_out")


def test_every_parameter_in_the_list_is_one_of_its_test(request: pytest.FixtureRequest) -> None:
    """Among the tests of this run: a parameter that nobody has would leave out the whole test."""
    quick = request.config.getoption("--quick")  # it has left out what `left_out` names
    for file, tests in listed().items():
        names = {item.nodeid for item in request.session.items if item.nodeid.startswith(f"{file}::")}
        for test, division in tests.items():
            if any(name.startswith(f"{file}::{test}[") for name in names):
                named = division.kept or () if quick else division.named
                assert [each for each in named if f"{file}::{test}[{each}]" not in names] == [], test


def test_plain_pytest_runs_all_and_quick_leaves_out(
    pytester: pytest.Pytester, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeconftest((request.path.parent / "conftest.py").read_text())
    pytester.makepyfile("import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_n(n): pass\n")
    path = Path(pytester.path / "extended.toml")
    path.write_text('["test_plain_pytest_runs_all_and_quick_leaves_out.py"]\ntest_n = ["2"]\n')
    monkeypatch.setattr("tests.extended.LIST", path)
    for words, passed in (((), 2), (("--quick",), 1)):
        pytester.runpytest("-p", "no:xdist", *words).assert_outcomes(passed=passed, deselected=2 - passed)
