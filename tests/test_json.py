"""`--json`: every verb prints one object, which is as the documented schema says, and nothing else on stdout."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from piper.cli import app_with, main
from piper.cli.application import SCHEMA, VERBS, schema_text

ROOT = Path(__file__).parents[1]
RECIPE = """
import torch
from torch import nn

import piper

print("a recipe that prints")


def job(**changes):
    fields = dict(
        model=lambda: piper.annotate_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": torch.ones(4, 4)}],
        strategy=[piper.replicate(piper.at(), [0, 1], zero=2)],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        checkpoint=piper.Checkpoint(folder="saved"),
        steps=3,
    )
    return piper.Job(**{**fields, **changes})


def protected():
    return job(strategy=[piper.replicate(piper.at(), [0, 1], zero=3), piper.protect(piper.at())])


def offloaded():
    return job(strategy=[piper.replicate(piper.at(), [0, 1], zero=3), piper.offload(piper.at(), what="optimizer")])


def uneven():
    return job(strategy=[piper.split(piper.at(), parts=3)])
"""

Piper = Callable[[str], tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("json")
    (folder / "net.py").write_text(RECIPE)
    torch.save(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).state_dict(), folder / "weights.pt"
    )
    return folder


@pytest.fixture
def piper(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Piper:
    """The command line in this process: its exit code, and its report, which the schema has allowed."""
    monkeypatch.chdir(folder)

    def call(command: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["piper", *command.split(), "--json"])
        with pytest.raises(SystemExit) as ended:
            main()
        (line,) = capsys.readouterr().out.splitlines()
        report: dict[str, Any] = json.loads(line)
        validate(report)
        return int(ended.value.code or 0), report

    return call


def validate(report: dict[str, Any]) -> None:
    """Compare a report with the schema, and refuse fields that it does not have."""
    schema: Any = json.loads(schema_text())
    jsonschema.validate(report, schema)
    strict = {
        name: {**definition, "additionalProperties": False} for name, definition in schema["$defs"].items()
    }
    rest = {name: value for name, value in report.items() if name not in ("schema", "verb")}
    verb = None if "error" in rest else report["verb"]  # a failure is of any verb
    kinds = [kind["$ref"] for kind in schema["anyOf"] if kind["properties"]["verb"].get("const") == verb]
    jsonschema.validate(rest, {"anyOf": [{"$ref": kind} for kind in kinds], "$defs": strict})


COMMANDS = {
    "init": "init mine",
    "plan": "plan net.py:job",
    "plan of a protected job": "plan net.py:protected",
    "plan of an offloaded job": "plan net.py:offloaded",
    "check": "check net.py:job --steps 1",
    "simulate": "simulate net.py:job",
    "simulate a protected job": "simulate net.py:protected",
    "simulate an offloaded job": "simulate net.py:offloaded",
    "tune": "tune net.py:job --cluster cpu --devices 2 --trials 2 --workers 1",
    "tune by length": "tune net.py:job --cluster cpu --devices 2 --trials 2 --workers 1 --lengths",
    "diff": "diff net.py:job net.py:protected",
    "schedule": "schedule dualpipe-v --ranks 2 --microbatches 4",
    "schedule that is searched for": "schedule synthesised --ranks 2 --microbatches 2",
    "train one rank": "train net.py:job --on rank:0 --steps 3",
    "selftest": "selftest --only versions --devices 2 --device cpu",
    "import": "import net.py:job weights.pt --out imported",
    "view": "view net.py:job --out page.html --svg grid.svg",
}


@pytest.mark.parametrize("what", COMMANDS)
def test_a_verb_prints_one_object_of_the_schema(what: str, piper: Piper) -> None:
    code, report = piper(COMMANDS[what])
    assert code == 0, report
    assert (report["schema"], report["verb"]) == (SCHEMA, COMMANDS[what].split()[0])


def test_verbs_of_a_run(piper: Piper) -> None:
    code, report = piper("train net.py:job --on inline --out run --profile 1")
    assert code == 0, report
    assert (report["run"], report["step"], report["stopped"], report["saved"]) == ("run", 3, None, True)
    lines = Path(report["metrics"]).read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert (len(losses), losses[0], losses[-1]) == (3, report["first_loss"], report["last_loss"])
    assert piper("train net.py:job --on inline --out run --resume")[1]["first_loss"] is None
    assert piper("profile run")[1]["devices"] == [0, 1]
    assert piper("export run out --format torch")[1]["step"] == 3


def test_every_verb_is_tried() -> None:
    tried = {command.split()[0] for command in COMMANDS.values()} | {"train", "profile", "export"}
    assert tried == set(VERBS)
    *of_verbs, of_failures = (kind["properties"]["verb"] for kind in json.loads(schema_text())["anyOf"])
    assert {kind["const"] for kind in of_verbs} == set(VERBS) == {*of_failures["enum"]}
    options = {verb.name: verb.callback for verb in app_with().registered_commands}
    assert all("as_json" in callback.__annotations__ for callback in options.values() if callback)


def test_an_error_is_an_object_too(piper: Piper) -> None:
    code, report = piper("plan net.py:uneven")
    assert code == 2
    assert report["error"]["what"] == "4 samples do not divide into 3 equal pieces"
    assert report["error"]["kind"] == "ScheduleError"
    assert report["error"]["message"].endswith(f"hint:    {report['error']['hint']}")


def test_what_processes_print_is_not_on_stdout(folder: Path) -> None:
    (folder / "loud.py").write_text(
        "import os, piper\nfrom net import job\n\ndef loud():\n    os.system('echo loud')\n    return job()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "piper", "plan", "loud.py:loud", "--json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert json.loads(done.stdout)["devices"] == [0, 1]
    assert "a recipe that prints\n" in done.stderr and "loud\n" in done.stderr


def test_the_schema_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(schema_text())["properties"] == {"schema": {"const": SCHEMA}}
    monkeypatch.setattr(sys, "argv", ["piper", "--schema"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out == schema_text()


def test_a_report_that_lacks_a_field_or_has_a_wrong_one_is_caught() -> None:
    good = {"schema": SCHEMA, "verb": "init", "file": "x.py", "recipes": []}
    validate(good)
    for wrong in (
        {**good, "file": 3},
        {**good, "more": 1},
        {**good, "schema": 2},
        {"schema": 1, "verb": "init"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate(wrong)
