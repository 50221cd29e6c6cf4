"""`piper export` and `piper import`: weights go to transformers and come back through the command line."""

import json
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
import torch

from piper.checkpoint.huggingface import import_hf
from piper.checkpoint.load import Values
from piper.cli import main

RECIPE = """
import torch
import transformers

import piper


def model():
    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    return piper.annotate_layers(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))


def job(**changes):
    tokens = torch.arange(16).view(4, 4)
    fields = dict(
        model=model,
        loss=piper.losses.huggingface,
        data=lambda: [{"input_ids": tokens, "labels": tokens}],
        strategy=piper.strategies.fsdp(dp=2),
        checkpoint=piper.Checkpoint(folder="checkpoints", every=1),
        steps=2,
    )
    return piper.Job(**{**fields, **changes})


def unsaved():
    return job(checkpoint=None)


def plain():
    rows = {"x": torch.arange(8.0).view(4, 2)}
    return job(
        model=lambda: torch.nn.Linear(2, 2),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [rows],
    )


def larger():
    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    return job(model=lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
"""


class Shell:
    """A folder with the recipe, in which commands run in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net.py").write_text(RECIPE)

    def __call__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
    ) -> tuple[object, str, str]:
        """Run a command; return its exit status, what it printed, and what it printed as errors."""
        monkeypatch.chdir(self.folder)
        monkeypatch.setattr(sys, "argv", ["piper", *command.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A folder with a trained run."""
    made = Shell(tmp_path_factory.mktemp("exporting"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.chdir(made.folder)
        patch.setattr(sys, "argv", ["piper", "train", "net.py:job", "--on", "inline", "--out", "run"])
        main()
    assert ended.value.code == 0
    yield made


def test_a_run_goes_to_transformers_and_starts_another_run(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    code, out, _ = shell(monkeypatch, capsys, "export run --format hf out --json")
    report = json.loads(out)
    assert code == 0 and report.pop("bytes") > 5000
    assert report == {
        "schema": 1,
        "verb": "export",
        "folder": "out",
        "format": "hf",
        "model": "LlamaForCausalLM",
        "checkpoint": "run/checkpoints/step-00000002",
        "step": 2,
    }
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    plain: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    saved = Values(shell.folder / "run/checkpoints/step-00000002")
    plain.load_state_dict({name: saved[name] for name in plain.state_dict()})
    read: Any = AutoModelForCausalLM.from_pretrained(shell.folder / "out")
    tokens = torch.arange(16).view(4, 4)
    assert torch.equal(read(tokens).logits, plain(tokens).logits)

    code, out, _ = shell(monkeypatch, capsys, "export run --format huggingface whole --json")
    assert code == 0 and json.loads(out)["format"] == "hf"
    names = ("config.json", "model.safetensors")
    assert all(
        (shell.folder / "whole" / n).read_bytes() == (shell.folder / "out" / n).read_bytes() for n in names
    )

    code, out, _ = shell(monkeypatch, capsys, "import net.py:job out --out again --json")
    assert (code, json.loads(out)) == (
        0,
        {
            "schema": 1,
            "verb": "import",
            "run": "again",
            "step": 0,
            "optimizer": False,
            "train": "piper train net.py:job --out again --resume",
        },
    )
    code, out, _ = shell(monkeypatch, capsys, "train net.py:job --on inline --out again --resume --steps 1")
    assert code == 0 and "Going on from again/checkpoints/step-00000000, after step 0" in out
    expected = plain(tokens, labels=tokens).loss.item()
    first = json.loads((shell.folder / "again/metrics.jsonl").read_text().splitlines()[0])
    assert abs(first["loss"] - expected) < 1e-6


def test_a_model_that_is_not_of_transformers(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --format it becomes a file of safetensors, which plain PyTorch loads by name."""
    from safetensors.torch import load_file

    assert shell(monkeypatch, capsys, "train net.py:plain --on inline --out own --steps 1")[0] == 0
    code, out, _ = shell(monkeypatch, capsys, "export own weights-of-own --json")
    report = json.loads(out)
    assert (code, report["format"], report["model"]) == (0, "safetensors", "Linear")
    linear, saved = torch.nn.Linear(2, 2), Values(shell.folder / "own/checkpoints/step-00000001")
    linear.load_state_dict(load_file(shell.folder / "weights-of-own/model.safetensors"))
    assert torch.equal(linear.weight, saved["weight"]) and torch.equal(linear.bias, saved["bias"])
    code, _, err = shell(monkeypatch, capsys, "export run wrong --recipe net.py:plain")
    assert code == 2 and not (shell.folder / "wrong").exists()
    assert "this checkpoint is of another model" in err and "missing:    weight, bias" in err


def test_a_checkpoint_as_another_type(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "export run/checkpoints/step-00000002 half --dtype bf16"
    code, out, _ = shell(monkeypatch, capsys, command)
    first, *rest = out.splitlines()
    assert code == 0 and first.startswith("Exported LlamaForCausalLM after 2 steps, ")
    assert rest == ["  from     run/checkpoints/step-00000002", "  to       half"]
    assert {value.dtype for value in import_hf(shell.folder / "half").values()} == {torch.bfloat16}


REFUSED = {
    "export run --format onnx out-1": """
        error: --format: there is no format 'onnx'
          hint: --format is one of hf, peft, dcp, torchtitan, safetensors, torch
    """,
    "export run out-1 --dtype int8": """
        error: --dtype: there is no type 'int8'
          hint: --dtype is one of fp32, bf16, fp64
    """,
    "export run --format peft out-1": """
        error: --format peft: a LlamaForCausalLM has no adapter
          hint: export all of it: --format hf
    """,
    "export run run": """
        error: run: this folder is not empty
          hint: name a new folder: export replaces nothing
    """,
    "export . out-1": """
        error: .: there is no run here, or it does not say which recipe it ran
          looked: for run.json and recipe.py
          hint:   name the folder that `piper train --out DIR` wrote, or add --recipe file.py:function
    """,
    "export missing out-1 --recipe net.py:job": """
        error: missing: this run has no complete checkpoint
          looked: in missing/checkpoints
          hint:   let the job save: piper.Job(..., checkpoint=piper.Checkpoint(folder="checkpoints"))
    """,
    "export run out-1 --recipe net.py:plain --format hf": """
        error: export_hf: a Linear is not a model of transformers
          hint: export other models with --format safetensors, torch or dcp; run.state_dict() has their values
    """,
    "import net.py:unsaved run": """
        error: net.py:unsaved: the job saves no checkpoints, so it cannot go on from one either
          hint: let the job save: piper.Job(..., checkpoint=piper.Checkpoint(folder="checkpoints"))
    """,
    "import net.py:job run": """
        error: run: this checkpoint cannot be read
          why:  FileNotFoundError: No such file or directory: run/model.safetensors
          hint: give a whole one: a DCP folder, a folder with model.safetensors or model.safetensors.index.json, or a file of torch.save that holds tensors, numbers, text and containers only
    """,
    "import net.py:job nowhere": """
        error: nowhere: there is no such file or folder
          hint: check the path
    """,
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused(
    command: str, shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = shell(monkeypatch, capsys, command)
    assert (code, out, err) == (2, "", cleandoc(REFUSED[command]) + "\n")
    assert not (shell.folder / "out-1").exists()


def test_a_run_whose_recipe_was_changed_is_exported_as_it_was_trained(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = Shell(tmp_path)
    (shell.folder / "run").rename(tmp_path / "run")
    (tmp_path / "net.py").write_text("the recipe is another by now")
    try:
        code, out, _ = moved(monkeypatch, capsys, "export run out --json")
    finally:
        (tmp_path / "run").rename(shell.folder / "run")
    assert (code, json.loads(out)["step"]) == (0, 2)


def test_weights_of_another_model_are_refused(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = shell(monkeypatch, capsys, "export run weights --to hf")
    assert (code, err) == (0, "warning: --to is deprecated and goes in 0.2: use --format\n")
    code, out, err = shell(monkeypatch, capsys, "import net.py:larger weights --out wrong")
    assert (code, out) == (2, "")
    assert "this checkpoint is of another model" in err
    assert "mlp.gate_proj.weight: saved [8, 8]" in err
    assert [path.name for path in (shell.folder / "wrong/checkpoints").iterdir()] == []
