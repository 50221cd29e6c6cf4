"""A training moves from FSDP2 to Piper and back, and its losses are those of one that never moved."""

import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from inspect import cleandoc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from piper.checkpoint.dcp import DcpFolder
from piper.checkpoint.load import Values
from piper.checkpoint.plain_state import find_state
from piper.cli import main
from piper.compiler import compile
from piper.directives import replicate
from piper.errors import ConfigError
from piper.ir.select import at
from piper.job import Checkpoint, Job
from piper.run.launch import launch
from piper.train.other_programs import export_state, import_start, source_of
from tests import warm
from tests.checkpoint.fsdp2_peer import WORLD, Net, adamw, batches, warmup

ROOT = Path(__file__).parents[2]
RECIPE = """
import torch
from torch import nn

import piper
from tests.checkpoint.fsdp2_peer import WIDTH, Block, Net, adamw, batches, warmup


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def job(**changes):
    fields = dict(
        model=lambda: piper.annotate_layers(Net()),
        loss=loss,
        data=lambda: [*batches()],
        strategy=piper.strategies.pipeline(layers=2, pp=2, dp=2, zero=2, schedule="1f1b", microbatches=2),
        optimizer=lambda named: adamw(named),
        scheduler=warmup,
        precision="fp64",
        checkpoint=piper.Checkpoint(folder="saved", every=2),
        steps=4,
    )
    return piper.Job(**{**fields, **changes})


def one():
    return job(strategy=[], steps=6)


def sgd():
    return job(optimizer=lambda params: torch.optim.SGD(params, lr=0.1), scheduler=None)


def adam():
    return job(optimizer=lambda params: torch.optim.Adam(params, lr=0.1), scheduler=None)


def constant():
    return job(scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5))


def one_group():
    return job(optimizer=lambda params: torch.optim.AdamW(params, lr=0.05))


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 5)


class Longer(Net):
    def __init__(self):
        super().__init__()
        self.layers.append(Block())


def wider():
    return job(model=Wider, strategy=[])


def longer():
    return job(model=Longer, strategy=[])


def shorter():
    return job(model=lambda: nn.Sequential(nn.Linear(WIDTH, 3)), strategy=[], optimizer=lambda named: adamw(named))
"""


def peer(folder: Path, *words: str) -> dict[str, list[float]]:
    """Run the FSDP2 program on two processes, and return its losses."""
    program = str(ROOT / "tests/checkpoint/fsdp2_peer.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        warm.Popen([sys.executable, program, str(rank), str(folder), *words], env=env)
        for rank in range(WORLD)
    ]
    assert [rank.wait(timeout=100) for rank in ranks] == [0] * WORLD
    losses: dict[str, list[float]] = json.loads((folder / f"{words[0]}.json").read_text())
    return losses


def piper(folder: Path, command: str) -> object:
    """Run a command of Piper in a folder of this process, and return its exit status."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["piper", *command.split()])
        main()
    return ended.value.code


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a recipe, and what FSDP2 saved after two of six steps."""
    folder = tmp_path_factory.mktemp("moved")
    (folder / "net.py").write_text(RECIPE)
    peer(folder, "train")
    yield folder


@pytest.fixture(scope="module")
def moved(folder: Path) -> Path:
    """A run of Piper that went on from FSDP2's folder for two steps, and its exports."""
    assert piper(folder, "import net.py:job fsdp2 --out run") == 0
    assert piper(folder, "train net.py:job --on inline --out run --resume") == 0
    for form in ("dcp", "torchtitan", "safetensors", "torch"):
        assert piper(folder, f"export run {form} --format {form}") == 0
    return folder


def test_a_training_goes_to_piper_and_back(moved: Path) -> None:
    never_moved = json.loads((moved / "train.json").read_text())["train"]
    assert losses_of(moved / "run") == pytest.approx(never_moved[2:4], rel=1e-12)
    assert len(set(never_moved)) == len(never_moved), "each step has a loss of its own"
    back = peer(moved, "continue", "dcp", "torchtitan")
    assert back == {
        "dcp": pytest.approx(never_moved[4:], rel=1e-12),
        "torchtitan": pytest.approx(never_moved[4:], rel=1e-12),
    }


@pytest.mark.parametrize("name", ["titan", "whole.pt"])
def test_other_forms_of_the_same_state_go_on_alike(name: str, folder: Path) -> None:
    run = Path(name).stem
    assert piper(folder, f"import net.py:one {name} --out from-{run}") == 0
    assert piper(folder, f"train net.py:one --on inline --out from-{run} --resume") == 0
    never_moved = json.loads((folder / "train.json").read_text())["train"]
    assert losses_of(folder / f"from-{run}") == pytest.approx(never_moved[2:], rel=1e-12)


@pytest.mark.parametrize("form", ["dcp", "torchtitan", "safetensors", "torch"])
def test_what_piper_exports_piper_imports(form: str, moved: Path) -> None:
    assert piper(moved, f"import net.py:one {form} --out back-{form}") == 0
    assert piper(moved, f"train net.py:one --on inline --out back-{form} --resume") == 0
    never_moved = json.loads((moved / "train.json").read_text())["train"]
    assert losses_of(moved / f"back-{form}") == pytest.approx(never_moved[4:], rel=1e-12)


def test_an_export_for_torch_goes_on_in_a_plain_loop(moved: Path) -> None:
    saved: dict[str, Any] = torch.load(moved / "torch/checkpoint.pt", weights_only=True)
    model = Net().double()
    optimizer = adamw(model.named_parameters())
    scheduler = warmup(optimizer)
    for _ in range(saved["step"]):
        scheduler.step()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    losses = []
    for batch in [*batches()][saved["step"] :]:
        loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    never_moved = json.loads((moved / "train.json").read_text())["train"]
    assert losses == pytest.approx(never_moved[4:], rel=1e-12)


def test_weights_in_safetensors_load_into_the_plain_model(moved: Path) -> None:
    from safetensors.torch import load_file

    saved = load_file(moved / "safetensors/model.safetensors")
    expected: dict[str, Tensor] = torch.load(moved / "torch/checkpoint.pt", weights_only=True)["model"]
    assert saved.keys() == Net().state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in expected.items())


REFUSED = {
    "import net.py:job nowhere": """
        error: nowhere: there is no such file or folder
          hint: check the path
    """,
    "import net.py:wider fsdp2": """
        error: load: this checkpoint is of another model
          path:  fsdp2
          other: head.weight: saved [3, 6] of any type, here [5, 6] float64 trained
          hint:  load it into the model and precision that it was saved from
    """,
    "import net.py:longer fsdp2": """
        error: load: this checkpoint is of another model
          path:    fsdp2
          missing: layers.2.inner.weight, layers.2.inner.bias, layers.2.norm.weight, and 2 more
          hint:    load it into the model and precision that it was saved from
    """,
    "import net.py:shorter fsdp2": """
        error: fsdp2: the optimizer's state is for parameters that the model does not have
          unknown: …
          hint:    import it with a recipe that builds the model it was saved from
    """,
    "import net.py:sgd fsdp2": """
        error: fsdp2: the checkpoint has another optimizer than the job
          differ in: amsgrad, betas, dampening, eps, momentum, nesterov
          hint:      go on with the optimizer that the checkpoint was saved from
    """,
    "import net.py:adam fsdp2": """
        error: fsdp2: the checkpoint has another optimizer than the job
          differ in: decoupled_weight_decay
          hint:      go on with the optimizer that the checkpoint was saved from
    """,
    "import net.py:constant fsdp2": """
        error: fsdp2: the job's schedule has another learning rate than the checkpoint
          saved: 0.0375 after 2 steps
          here:  0.025
          hint:  give the job the schedule of the run that it continues
    """,
    "import net.py:one_group fsdp2": """
        error: fsdp2: parameters of one group of the job's optimizer have other options in the checkpoint
          parameters: layers.0.inner.weight, layers.0.inner.bias
          hint:       give the job's optimizer the groups of the run that it continues
    """,
    "import net.py:job net.py": """
        error: net.py: this checkpoint cannot be read
          why:  …
          hint: give a whole one: a DCP folder, a folder with model.safetensors or model.safetensors.index.json, or a file of torch.save that holds tensors, numbers, text and containers only
    """,
    "import net.py:job fsdp2 --out dcp": """
        error: dcp: this folder holds files that are not a run's
          has:  .metadata, __0_0.distcp, piper-export.json
          hint: name a new or empty folder: --out DIR
    """,
    "export run dcp --format dcp": """
        error: dcp: this folder is not empty
          hint: name a new folder: export replaces nothing
    """,
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused(command: str, moved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in moved.rglob("*") if path.is_file()}
    assert piper(moved, f"{command} --out refused" if "--" not in command else command) == 2
    out, err = capsys.readouterr()
    pattern = re.escape(cleandoc(REFUSED[command]) + "\n").replace("…", ".*")
    assert (out, re.fullmatch(pattern, err) is not None) == ("", True), err
    assert before == {path: path.stat().st_mtime_ns for path in before if path.is_file()}, (
        "nothing was overwritten"
    )
    shutil.rmtree(moved / "refused", ignore_errors=True)


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "fsdp2", tmp_path / "fsdp2"))


def refusal(folder: Path) -> str:
    """Read every value of a DCP folder, and return the error."""
    with pytest.raises(ConfigError, match="this checkpoint cannot be read") as error:
        [*DcpFolder(folder).values()]
    return str(error.value)


def test_a_truncated_file_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = copy_of(folder, tmp_path)
    file = max(copy.glob("*.distcp"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])
    assert f"{file.name} ends before byte" in refusal(copy)
    file.unlink()
    assert "No such file" in refusal(copy)


@pytest.mark.parametrize("size", [0, 1, 100, 2000])
def test_a_truncated_index_is_refused(size: int, folder: Path, tmp_path: Path) -> None:
    copy = copy_of(folder, tmp_path)
    (copy / ".metadata").write_bytes((copy / ".metadata").read_bytes()[:size])
    assert ".metadata" in refusal(copy)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.function, self.arguments


def test_an_index_that_would_run_code_runs_none(folder: Path, tmp_path: Path) -> None:
    copy = copy_of(folder, tmp_path)
    witness = tmp_path / "ran"
    calls = [
        Call(os.system, f"touch {witness}"),
        Call(eval, f"open({str(witness)!r}, 'w')"),
        Call(getattr, "text", "upper"),
        Call(torch.load, str(witness)),
        Call(Path.touch, witness),
        Call(torch.nn.Linear, 1, 1),
        Call(torch.hub.load, "x", "y"),
        Call(type, "x", (), {}),
    ]
    for call in calls:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            (copy / ".metadata").write_bytes(pickle.dumps({"a": [call]}, protocol=protocol))
            assert "which is no record of DCP" in refusal(copy)
    assert not witness.exists()


def test_an_index_of_an_early_python_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2, which Debian has, pickles a member of an enum as an attribute of its class."""

    def attribute(self: Enum, protocol: int) -> object:
        return getattr, (type(self), self.name)

    monkeypatch.setattr(Enum, "__reduce_ex__", attribute)
    dcp_save({"weight": torch.arange(6.0)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert b"getattr" in (tmp_path / "dcp/.metadata").read_bytes()
    assert torch.equal(DcpFolder(tmp_path / "dcp")["weight"], torch.arange(6.0))


def test_a_value_that_would_run_code_runs_none(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    dcp_save(
        {"model": {"weight": Call(os.system, f"touch {witness}")}},
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    assert "UnpicklingError" in refusal(tmp_path / "dcp")
    torch.save({"model": Call(os.system, f"touch {witness}")}, tmp_path / "file.pt")
    with pytest.raises(ConfigError, match="this checkpoint cannot be read"):
        source_of(tmp_path / "file.pt")
    assert not witness.exists()


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the index of a DCP folder by torch's own classes."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_index_that_contradicts_itself_is_refused(folder: Path, tmp_path: Path) -> None:
    def elsewhere(metadata: Any) -> None:  # noqa: ANN401
        for info in metadata.storage_data.values():
            info.relative_path = "../" + info.relative_path

    def larger(metadata: Any) -> None:  # noqa: ANN401
        metadata.state_dict_metadata["model.head.weight"].size = torch.Size([2**40, 6])

    def outside(metadata: Any) -> None:  # noqa: ANN401
        metadata.state_dict_metadata["model.head.weight"].chunks[0].offsets = torch.Size([9, 0])

    def another(metadata: Any) -> None:  # noqa: ANN401
        metadata.state_dict_metadata["model.head.weight"].properties.dtype = torch.float32

    said = {
        elsewhere: "is not the name of a file",
        larger: "do not make it up",
        outside: "lies outside",
        another: "is not what .metadata says",
    }
    for change, words in said.items():
        copy = copy_of(folder, tmp_path)
        changed(copy, change)
        assert words in refusal(copy)
        shutil.rmtree(copy)


def test_numbered_parameters_take_the_order_of_the_jobs_optimizer() -> None:
    state = {"0": torch.ones(2), "1": torch.zeros(2)}
    source = {f"optimizer.state.{number}.exp_avg": value for number, value in state.items()}
    source |= {"a.weight": torch.ones(2), "b.weight": torch.ones(2)}
    options: dict[str, object] = {
        "optimizer.param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    }
    names = ["a.weight", "b.weight"]
    found = find_state(Path("x"), source | options, [*source], names, [["b.weight"], ["a.weight"]])
    assert found.kept == {
        "b.weight": {"exp_avg": "optimizer.state.0.exp_avg"},
        "a.weight": {"exp_avg": "optimizer.state.1.exp_avg"},
    }
    assert {name: group["lr"] for name, group in found.options.items()} == {"b.weight": 0.1, "a.weight": 0.2}
    with pytest.raises(ConfigError, match="in other groups than the job's optimizer"):
        find_state(Path("x"), source | options, [*source], names, [names])


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "model.module.", "app.model.", "_orig_mod."])
def test_names_are_found_below_any_prefix(prefix: str) -> None:
    names = ["head.weight", "layers.0.weight"]
    source: dict[str, object] = {
        key: torch.ones(1) for key in (*(prefix + n for n in names), "ema." + names[0])
    }
    found = find_state(Path("x"), source | {"step": 7}, [*source], names, [])
    expected = {*names, "ema." + names[0]} if prefix in ("", "_orig_mod.") else {*names}
    assert ({*found.values}, found.step) == (expected, 7)
    assert all(torch.equal(found.values[name], torch.ones(1)) for name in names)


def test_two_optimizers_are_refused() -> None:
    source = {"g.state.a.exp_avg": torch.ones(1), "d.state.b.exp_avg": torch.ones(1)}
    with pytest.raises(ConfigError, match="there are several optimizers"):
        find_state(Path("x"), source, [*source], ["a", "b"], [])


class Tied(torch.nn.Module):
    """A decoder whose head is its embedding, with a layer that is not trained and a buffer that is not saved."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = torch.nn.Embedding(12, 4), torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.middle.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.register_buffer("steps", torch.zeros(3))
        self.gain = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.middle(self.embedding(tokens))) * self.scale * self.gain)
        return out


@pytest.mark.parametrize(
    ("form", "optimizer"),
    [
        ("dcp", torch.optim.AdamW),
        ("torchtitan", torch.optim.SGD),
        ("safetensors", torch.optim.AdamW),
        ("torch", torch.optim.Adagrad),
    ],
)
def test_tied_frozen_and_unsaved_tensors_move(form: str, optimizer: Any, tmp_path: Path) -> None:  # noqa: ANN401
    tokens = torch.arange(24).view(4, 6) % 12
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    job = Job(
        model=Tied,
        loss=lambda model, batch: torch.nn.functional.cross_entropy(
            model(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten().roll(1)
        ),
        data=lambda: [{"tokens": tokens}] * 4,
        strategy=[replicate(at(), devices=[0, 1], zero=3)],
        optimizer=lambda params: optimizer(params, lr=0.05, **options),
        precision="fp64",
    )
    with launch(compile(job), on="inline") as run:
        [*run.train(2)]
        run.save(tmp_path / "saved")
        expected = [result.loss for result in run.train(2)]
    export_state(job, Values(tmp_path / "saved"), tmp_path / form, form=form, dtype=None)
    job = replace(job, checkpoint=Checkpoint(folder="saved"))
    made = import_start("net.py:job", job, tmp_path / form, tmp_path / "run")
    assert (made.step, made.optimizer) == (2, True)
    with launch(compile(job), on="inline", resume=tmp_path / "run") as run:
        assert [result.loss for result in run.train(2)] == expected
    if form == "torch":
        saved: dict[str, Any] = torch.load(tmp_path / "torch/checkpoint.pt", weights_only=True)
        assert Tied().double().load_state_dict(saved["model"]).missing_keys == []


def test_weights_may_be_written_as_another_type(moved: Path) -> None:
    assert piper(moved, "export run half --format dcp --dtype bf16") == 0
    saved = DcpFolder(moved / "half")
    kinds = {name: value.dtype for name, value in saved.items() if isinstance(value, Tensor)}
    assert kinds["model.head.weight"] == kinds["model.layers.0.scale"] == torch.bfloat16
    assert kinds["optimizer.state.head.weight.exp_avg"] == torch.float64
