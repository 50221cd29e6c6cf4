"""Trains the small models of transformers' own tests with Piper, and compares each with plain PyTorch in fp64.

    python tests/architectures/theirs.py CHECKOUT [MODEL ...]

CHECKOUT: a clone of transformers at the installed version. MODEL: folders of its tests/models; all by default,
which takes some hours. Each class that has a loss gets a line: `loss`, where `piper.losses.huggingface` gives
another value than the class itself; `differs`, where training does; `raw`, an error that is none of Piper's; `refused`
and what Piper said; or `equal`.
A model that draws random numbers besides its dropout, two calls of which differ, is left out. Exits with 1 if
anything differs. It is a script because transformers' tests are a package of the same name as these.
"""

import copy
import importlib
import inspect
import sys
import unittest
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

import piper
from piper.errors import PiperError

STEPS, SAMPLES, LARGEST = 2, 4, 30_000_000
# Their layers compute in float32 here and there, also in a model of float64.
LOSS, STATE = 1e-6, 1e-5
UNUSED = (
    "datasets",
    "librosa",
    "pandas",
    "parameterized",
    "scipy",
    "timeout_decorator",
)  # where no test runs
RANDOM = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A class of models, its small configuration, and a batch with labels."""

    model: type[nn.Module]
    config: Any
    batch: Batch
    options: Mapping[str, object]  # arguments that are no tensors

    def build(self) -> nn.Module:
        """Build the model without dropout, from its first random numbers."""
        torch.manual_seed(0)
        made = self.model(copy.deepcopy(self.config)).double().train()
        for module in made.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        return made

    def own_loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss that the class itself computes."""
        loss: Tensor = model(**batch, **self.options).loss
        return loss


def cases(file: str) -> Iterator[Case]:
    """Yield the classes of a file of tests that compute a loss from labels."""
    tests = importlib.import_module(file)
    for test in [*vars(tests).values()]:
        if not inspect.isclass(test) or not hasattr(test, "_prepare_for_class"):
            continue
        if test.__module__ != tests.__name__ or not issubclass(test, unittest.TestCase):
            continue
        made: Any = test.__new__(test)
        unittest.TestCase.__init__(made, "setUp")
        made.setUp()
        tester = made.model_tester
        for each in (tester, *vars(tester).values()):  # one of images and one of texts
            if hasattr(each, "batch_size"):
                each.batch_size = SAMPLES
        torch.manual_seed(0)
        importlib.import_module("tests.test_modeling_common").global_rng.seed(0)
        config, inputs = tester.prepare_config_and_inputs_for_common()
        still(config)
        for model in made.all_model_classes:
            given = made._prepare_for_class(copy.deepcopy(inputs), model, return_labels=True)
            add_labels(model, given)
            if "labels" in given or "start_positions" in given:
                yield case(model, config, given)


def add_labels(model: type[nn.Module], given: dict[str, Any]) -> None:
    """Add the labels that a class takes where its tests give none."""
    takes = inspect.signature(model.forward).parameters
    tokens = given.get("decoder_input_ids", given.get("input_ids"))
    if "labels" in takes and isinstance(tokens, Tensor):
        given.setdefault("labels", tokens.clone())
    elif "start_positions" in takes:
        given |= dict.fromkeys(("start_positions", "end_positions"), torch.arange(SAMPLES))


def case(model: type[nn.Module], config: object, given: Mapping[str, Any]) -> Case:
    """Return a case whose labels are not all the same."""
    batch = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    labels = batch.get("labels")
    if labels is not None and not labels.is_floating_point():
        batch["labels"] = torch.arange(labels.numel()).view(labels.shape) % 2
    double = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    options = {name: value for name, value in given.items() if name not in batch and value is not None}
    return Case(model=model, config=config, batch=double, options=options)


def still(config: object) -> None:
    """Take what is random out of a configuration and those inside of it."""
    inner = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    for each in (config, *inner):
        for name, value in vars(each).items():
            if any(part in name for part in RANDOM):
                if isinstance(value, float):
                    setattr(each, name, 0.0)
                elif isinstance(value, list | tuple):  # of each stage
                    setattr(each, name, [0.0] * len(value))
        # the others have no float64, or a loop over experts
        each._experts_implementation = "batched_mm"


def verdict(made: Case) -> str:
    """Return what training a case gave, or why it was left out."""
    try:
        model = made.build()
        size = sum(parameter.numel() for parameter in model.parameters())
        losses = [made.own_loss(model, made.batch).detach() for _ in range(2)]
    except Exception as error:  # noqa: BLE001  what transformers itself cannot run is none of ours
        return f"left out: {type(error).__name__} in plain PyTorch"
    if size > LARGEST or losses[0].ndim or not torch.equal(*losses):
        return "left out: too large, random, or no single loss"
    try:
        total, weight = piper.losses.huggingface(model, made.batch)
    except (PiperError, AttributeError):
        return compare(made, [], made.own_loss)  # no (sum, weight) form: one device
    if not torch.allclose((total / weight).double(), losses[0].double(), rtol=1e-5):
        return f"loss: {float(total / weight):.6f} for {float(losses[0]):.6f}"
    norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if norms or made.options or {len(field) for field in made.batch.values()} != {SAMPLES}:
        return compare(made, [], made.own_loss)
    halves = [piper.replicate(piper.at(), [0, 1], zero=3), piper.split(piper.at(), parts=2)]
    return compare(made, halves, piper.losses.huggingface)


def compare(made: Case, strategy: list[piper.Directive], loss: Any) -> str:  # noqa: ANN401
    """Train some steps with Piper and in plain PyTorch, from the same values."""
    job = piper.Job(
        model=made.build,
        loss=loss,
        data=lambda: [made.batch],
        strategy=strategy,
        precision="fp64",
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    )
    try:
        with piper.launch(piper.compile(job, device="cpu"), on="inline", timeout=300) as run:
            first = {name: value.clone() for name, value in run.state_dict().items()}
            mine = [run.step(made.batch).loss for _ in range(STEPS)]
            state = run.state_dict()
    except PiperError as error:
        return "refused: " + " | ".join(str(error).splitlines()[:2])
    except Exception as error:  # noqa: BLE001  Piper has no message of its own for it
        return f"raw: {type(error).__name__}: {error}"
    plain = made.build()
    plain.load_state_dict(first, strict=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    theirs = []
    for _ in range(STEPS):
        value = made.own_loss(plain, made.batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(float(value))
    apart = max(abs(one - other) / abs(other) for one, other in zip(mine, theirs, strict=True))
    ends = plain.state_dict()
    off, right = 0.0, apart < LOSS
    for name, value in state.items():
        if value.numel():
            gap = float((value.double() - ends[name].double()).abs().max())
            moved = float((value.double() - first[name].double()).abs().max())
            off, right = max(off, gap), right and gap <= STATE * max(1.0, moved)
    where = "one device" if not strategy else "DP2, ZeRO-3, 2 microbatches"
    return f"{'equal' if right else 'differs'}: {where}, losses {apart:.1e}, state {off:.1e}"


def main(checkout: Path, folders: list[str]) -> int:
    """Compare the models of some folders, or of all. Return the exit code."""
    warnings.filterwarnings("ignore")
    importlib.import_module("transformers.modeling_utils")  # which asks what there is
    importlib.import_module("transformers.utils.logging").set_verbosity_error()
    sys.path.insert(0, str(checkout))
    for name in UNUSED:
        if find_spec(name) is None:
            sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    models = checkout / "tests" / "models"
    wrong = 0
    for path in sorted(models.glob("*/test_modeling_*.py")):
        folder = path.parent.name
        if folders and folder not in folders:
            continue
        try:
            found = [*cases(f"tests.models.{folder}.{path.stem}")]
        except Exception as error:  # noqa: BLE001  tests that need more than is installed
            print(f"{folder}: left out: {type(error).__name__}: {str(error)[:80]}", flush=True)  # noqa: T201
            continue
        for made in found:
            text = verdict(made)
            wrong += text.startswith(("loss", "differs", "raw"))
            print(f"{folder} {made.model.__name__}: {text}", flush=True)  # noqa: T201
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
