"""`piper diff`: which nodes two plans share, and which of them moved."""

import json
from pathlib import Path

import pytest

from piper import schedules
from piper.cli import main
from piper.cli.diff import changes, longest_run
from piper.plan.text import show_plans
from tests.simulate.pipelines import pipeline
from tests.simulate.test_simulate import job, step


def test_plans_are_like_themselves() -> None:
    plans, _, _ = pipeline(schedules.one_f_one_b, 3, 4)
    assert changes(plans, plans) == {"only_a": [], "only_b": [], "moved": [], "shifted": []}


def test_what_is_gone_new_moved_and_shifted() -> None:
    first = job([step("compute", name, "x") for name in "abcd"], [step("compute", "e", "x")])
    second = job(
        [
            step("compute", "b", "x"),
            step("compute", "c", "y"),
            step("compute", "a", "x"),
            step("compute", "e", "x"),
        ],
        [step("compute", "f", "x")],
    )
    assert changes(first, second) == {
        "only_a": ["d"],
        "only_b": ["f"],
        "moved": [
            {"node": "c", "a": {"devices": "0", "stream": "x"}, "b": {"devices": "0", "stream": "y"}},
            {"node": "e", "a": {"devices": "1", "stream": "x"}, "b": {"devices": "0", "stream": "x"}},
        ],
        "shifted": [{"node": "a", "device": 0, "a": 0, "b": 2}],
    }


def test_schedules_differ_in_the_order_alone() -> None:
    one, _, _ = pipeline(schedules.one_f_one_b, 2, 4)
    fill, _, _ = pipeline(schedules.gpipe, 2, 4)
    found = changes(one, fill)
    assert not found["only_a"] and not found["only_b"] and not found["moved"]
    assert {s["device"] for s in found["shifted"]} == {0, 1}


def test_the_longest_rising_part() -> None:
    assert longest_run([]) == set()
    assert longest_run([3, 0, 1, 2]) == {1, 2, 3}
    assert longest_run([0, 1, 2]) == {0, 1, 2}


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["piper", "diff", *words])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    paths = []
    for name, schedule in (("a", schedules.one_f_one_b), ("b", schedules.gpipe)):
        paths.append(tmp_path / f"{name}.txt")
        paths[-1].write_text(show_plans(pipeline(schedule, 2, 4)[0]))
    return str(paths[0]), str(paths[1])


def test_saved_plans_side_by_side(
    texts: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *texts) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        f"A  {texts[0]}",
        f"B  {texts[1]}",
        "In units, F = I = W = 1, communication free: plans in a file say no more of costs",
    ]
    assert [line.split() for line in lines[5:7]] == [
        ["step", "15", "15", "1.00"],
        ["bubble,", "all", "devices", "20.0", "%", "20.0", "%", "1.00"],
    ]
    assert "At another place in their device's order: " in "\n".join(lines)


def test_the_folder_of_a_run(
    texts: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.txt").write_text(Path(texts[0]).read_text())
    assert call(monkeypatch, str(tmp_path / "run"), texts[0], "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert not (told["only_a"] or told["only_b"] or told["moved"] or told["shifted"])


def test_one_object(
    texts: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *texts, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"schema", "verb", "clock", "a", "b", "only_a", "only_b", "moved", "shifted"}
    assert told["clock"] == "units"
    assert told["a"]["step"] == told["b"]["step"] == 15
    assert told["b"]["peak_bytes"] > told["a"]["peak_bytes"], "gpipe holds every microbatch"
    assert told["shifted"] and not told["moved"]


def test_something_that_is_neither(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, str(tmp_path / "none.py:f"), "b.txt") == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/none.py: there is no such file\n"
        "  hint: give the path of a Python file, then :function\n"
    )


def test_a_file_that_holds_no_plans(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    assert call(monkeypatch, str(path), str(path)) == 2
    assert capsys.readouterr().err == (
        f"error: {path}:1: this line cannot be read\n"
        "  line: hello\n"
        "  why:  'hello' begins no line here\n"
        "  hint: use the text as `piper plan --text` writes it\n"
    )
