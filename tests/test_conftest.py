"""The golden fixture: it compares, it shows the whole text, and it writes when asked."""

import pytest

pytest_plugins = ["pytester"]

TEST = """
def test_picture(golden):
    golden("picture", "F0 F1\\nB0 B1")
"""


@pytest.fixture
def project(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> pytest.Pytester:
    pytester.makeconftest((request.path.parent / "conftest.py").read_text())
    pytester.makepyfile(TEST)
    return pytester


def test_a_missing_golden_is_shown(project: pytest.Pytester) -> None:
    result = project.runpytest("-p", "no:xdist")
    result.stdout.fnmatch_lines(["there is no picture.txt yet*", "F0 F1", "B0 B1"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_an_updated_golden_compares(project: pytest.Pytester) -> None:
    assert project.runpytest("-p", "no:xdist", "--update-golden").ret == pytest.ExitCode.OK
    assert (project.path / "golden" / "picture.txt").read_text() == "F0 F1\nB0 B1\n"
    assert project.runpytest("-p", "no:xdist").ret == pytest.ExitCode.OK


def test_a_mismatch_shows_both_texts(project: pytest.Pytester) -> None:
    (project.path / "golden").mkdir()
    (project.path / "golden" / "picture.txt").write_text("F0\n")
    result = project.runpytest("-p", "no:xdist")
    result.stdout.fnmatch_lines(["picture.txt differs*", "wanted:", "F0", "got:", "F0 F1", "B0 B1"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
