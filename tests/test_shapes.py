"""A run over batches of several shapes compiles each once, and gives the numbers of plain PyTorch."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piper
from piper.check.check import check
from piper.compiler import Program
from piper.compiler import build as building
from piper.directives import Directive
from piper.errors import CaptureError, ConfigError, WorkerError
from piper.run.launch import launch_inline, launch_single_rank
from piper.runtime.batch import arranged, read_shapes, wanted_batch
from tests import plain
from tests.workers import sabotage
from tests.workers.sabotage import Sabotaged

Batch = Mapping[str, Tensor]


class Net(nn.Module):
    """Two stages, of which the first mixes the positions of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, words: Tensor) -> Tensor:
        with piper.annotate("PP"):
            h = self.words(words).cumsum(1).tanh()
        with piper.annotate("PP"):
            logits: Tensor = self.last(h)
            return logits


def summed(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    logits, labels = model(batch["words"]).flatten(0, 1), batch["labels"].flatten()
    total = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["words"]).flatten(0, 1), batch["labels"].flatten())


def rows(samples: int, length: int, seed: int = 0, *, ignored: bool = False) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    words, labels = (torch.randint(0, 11, (samples, length), generator=rng) for _ in range(2))
    if ignored:  # a different number of labels counts in each sample
        labels[torch.rand(samples, length, generator=rng) < 0.3] = -100
    return {"words": words, "labels": labels}


def four_devices(zero: int = 3) -> list[Directive]:
    at = piper.at
    return [
        *(piper.replicate(at(PP=i), [2 * i, 2 * i + 1], zero=zero) for i in range(2)),
        piper.split(at(), parts=2),
        *piper.schedules.one_f_one_b(2, 2),
    ]


def job(batches: Sequence[Batch], **options: object) -> piper.Job:
    given: dict[str, Any] = {"loss": summed, "strategy": four_devices(), "optimizer": plain.sgd, **options}
    return piper.Job(model=Net, data=lambda: batches, precision="fp64", steps=len(batches), **given)


@pytest.fixture(scope="module")
def program() -> Program:
    return piper.compile(job([rows(8, 3)]))


def compare(program: Program, batches: Sequence[Batch], on: str = "inline") -> None:
    """Train on batches, and compare losses and state with plain PyTorch on whole batches."""
    with piper.launch(program, on=on) as run:
        losses = [run.step(batch).loss for batch in batches]
        state = run.state_dict()
    wanted = plain.train(Net, cast(plain.Loss, program.job.loss), batches)
    assert losses == pytest.approx(wanted.losses, abs=1e-9, rel=0)
    assert plain.largest_difference(wanted.state, state) < 1e-9


def test_eight_lengths_compile_once_each_and_equal_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = building.build

    def counted(*args: Any, **kwargs: Any) -> Program:  # noqa: ANN401
        made = build(*args, **kwargs)
        built.append(args[1].batch["words"].shape[1])
        return made

    monkeypatch.setattr(building, "build", counted)
    lengths = [3, 5, 4, 9, 2, 7, 6, 8]
    batches = [rows(8, length, seed, ignored=True) for seed, length in enumerate(lengths * 2)]
    program = piper.compile(job(batches))
    compare(program, batches)
    assert built == lengths  # the first is compiled before the run
    compare(program, batches[:8])  # another run of the same program compiles nothing
    assert built == lengths
    assert len(program.shapes) == 7


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "piper"]


@pytest.mark.parametrize("loss", [summed, mean])
def test_an_uneven_batch_equals_one_device(loss: Any) -> None:  # noqa: ANN401
    sizes = [8, 7, 8, 3, 1] if loss is summed else [8, 3]  # 7, 3 and 1 do not divide into 4 slices
    batches = [rows(size, 3, seed, ignored=loss is summed) for seed, size in enumerate(sizes)]
    compare(piper.compile(job(batches, loss=loss)), batches)


@pytest.mark.parametrize(
    ("samples", "slices", "multiple", "wanted"),
    [
        (7, 4, 1, (2, [2, 2, 2, 1])),
        (3, 4, 1, (1, [1, 1, 1, 0])),
        (1, 4, 2, (2, [1, 0, 0, 0])),
        (5, 2, 1, (4, [4, 1])),
        (63, 8, 1, (9, [9, 9, 9, 9, 9, 9, 9, 0])),
        (61, 8, 1, (10, [10, 10, 10, 10, 10, 10, 1, 0])),
        (6, 2, 2, (4, [4, 2])),
    ],
)
def test_samples_fill_slices(samples: int, slices: int, multiple: int, wanted: tuple[int, list[int]]) -> None:
    """Every slice has as many rows; the samples of one divide its rows, so that each occurs equally often."""
    assert arranged(samples, slices, multiple) == wanted


class Depth(nn.Module):
    """A model with another layer for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        return self.more(h) if x.shape[1] > 2 else h


def test_a_model_with_other_parameters_for_a_shape_is_refused() -> None:
    batches = [{"x": torch.ones(2, 2, 4)}, {"x": torch.ones(2, 3, 4)}]
    made = piper.Job(model=Depth, loss=lambda m, b: m(b["x"]).square().mean(), data=lambda: batches)
    with piper.launch(piper.compile(made)) as run, pytest.raises(CaptureError) as caught:
        run.step(batches[0])
        run.step(batches[1])
    assert "the model has other parameters for batches of other sizes" in str(caught.value)
    assert "more.bias is trained only for one of them" in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "wanted", "got"),
    [
        ({"words": torch.ones(8, 3)}, "labels (8, 3)", "no such field"),
        ({**rows(8, 3), "words": torch.ones(8, 3)}, "words of int64", "words of float32"),
        ({**rows(8, 3), "words": torch.ones(8)}, "words (8, 3), or other sizes of 2 axes", "words (8,)"),
        ({**rows(8, 3), "words": rows(4, 3)["words"]}, "same number of samples", "words 4, labels 8"),
        (rows(8, 0), "words with at least one element", "words (8, 0)"),
    ],
)
def test_a_batch_of_another_kind_is_refused(program: Program, batch: Batch, wanted: str, got: str) -> None:
    with piper.launch(program) as run, pytest.raises(ConfigError) as caught:
        run.step(batch)
    assert "step: the batch is not like the one that was compiled" in str(caught.value)
    assert wanted in str(caught.value) and got in str(caught.value)


BUCKETS = piper.Buckets(lengths=[4, 6], pad={"words": 0, "labels": -100})


def test_batches_are_padded_to_buckets(caplog: pytest.LogCaptureFixture) -> None:
    """Both lengths are compiled before the run; a longer batch is compiled when it comes."""
    batches = [rows(8, length, length, ignored=True) for length in (3, 6, 5, 4, 2, 7, 7)]
    program = piper.compile(job(batches, buckets=BUCKETS))
    assert len(program.shapes) == 1
    with caplog.at_level(logging.WARNING, logger="piper"):
        compare(program, batches)
    compiling, proven = said(caplog)  # of one shape, though it comes twice
    assert compiling == "Compiling for another shape of batches: words [8, 7], labels [8, 7]"
    assert proven.startswith("Proven. A device takes ")
    assert len(program.shapes) == 2
    with piper.launch(program) as run:
        run.step(batches[0])
        got = run.evaluate([rows(8, 5, 1, ignored=True)]).loss
        wanted = summed(plain_model(run.state_dict()), rows(8, 5, 1, ignored=True))
    assert got == pytest.approx((wanted[0] / wanted[1]).item(), abs=1e-12)


def plain_model(state: Mapping[str, Tensor]) -> nn.Module:
    model = Net().double()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [], "pad": {"words": 0}}, "lengths=[]"),
        ({"lengths": [0], "pad": {"words": 0}}, "lengths=[0]"),
        ({"lengths": 4, "pad": {"words": 0}}, "lengths=4"),
        ({"lengths": [4], "pad": {}}, "pad={}"),
        ({"lengths": [4], "pad": {"words": "0"}}, "pad={'words': '0'}"),
    ],
)
def test_buckets_check_themselves(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        piper.Buckets(**options)
    assert f"): {message}\n" in str(caught.value)


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        ({"wrods": 0}, "Buckets: there is no field 'wrods' to pad"),
        ({"words": 0, "labels": -100}, "Buckets: the fields to pad differ in their lengths"),
    ],
)
def test_fields_that_cannot_be_padded(pad: dict[str, float], message: str) -> None:
    batch = {**rows(2, 3), "labels": torch.ones(2, dtype=torch.int64)}
    made = piper.Job(
        model=Net,
        loss=lambda model, batch: model(batch["words"])[:, 0].square().mean(),
        data=lambda: [batch],
        buckets=piper.Buckets(lengths=[4], pad=pad),
    )
    with pytest.raises(ConfigError, match=message):
        piper.compile(made)


class Normed(nn.Module):
    """A model whose forward writes buffers and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.last = nn.Embedding(11, 6), nn.BatchNorm1d(6), nn.Linear(6, 11)

    def forward(self, words: Tensor) -> Tensor:
        with piper.annotate("PP"):
            h = F.dropout(self.norm(self.words(words).flatten(0, 1)), 0.2, self.training)
        with piper.annotate("PP"):
            logits: Tensor = self.last(h).view(*words.shape, -1)
            return logits


@pytest.fixture(scope="module")
def normed() -> Program:
    return piper.compile(replace(job([rows(8, 3)]), model=Normed))


SEVERAL = [rows(*sizes, seed, ignored=True) for seed, sizes in enumerate([(8, 3), (8, 5), (7, 3), (8, 3)])]


def test_check_compares_every_shape(normed: Program) -> None:
    """Buffers and random numbers go on from one shape to the next."""
    report = check(normed, launch_inline, SEVERAL)
    assert report.ok, report
    assert report.max_param_diff < 1e-12
    assert len(normed.shapes) == 2


def test_check_names_padding_that_counts() -> None:
    buckets = piper.Buckets(lengths=[4], pad={"words": 0, "labels": 0})
    given = job([rows(8, 3)], buckets=buckets, strategy=())
    report = check(piper.compile(given), launch_inline, [*given.data()])
    assert report.first_bad is not None and "the padded batch gives other numbers" in report.first_bad


def test_a_run_over_several_shapes_resumes_bit_for_bit(normed: Program, tmp_path: Path) -> None:
    with piper.launch(normed) as run:
        for batch in SEVERAL[:2]:
            run.step(batch)
        run.save(tmp_path / "saved")
        wanted = [run.step(batch) for batch in SEVERAL[2:]], run.state_dict()
    with piper.launch(normed, resume=tmp_path / "saved") as run:
        got = [run.step(batch) for batch in SEVERAL[2:]], run.state_dict()
    assert got[0] == wanted[0]
    assert all(torch.equal(got[1][name], value) for name, value in wanted[1].items())


def test_outputs_are_those_of_the_last_step(normed: Program) -> None:
    with piper.launch(normed, keep_outputs=True) as run:
        for batch, length in ((SEVERAL[0], 3), (SEVERAL[1], 5), (SEVERAL[0], 3)):
            run.step(batch)
            shapes = {tuple(value.shape) for value in run.trails()[0].values()}
            assert (2 * length, 6) in shapes


def test_a_failure_in_another_shape_names_its_instruction(normed: Program) -> None:
    broken = replace(normed, shapes=dict(normed.shapes))
    rest = Sabotaged(program=normed.shaped(SEVERAL[1]), arg="F PP=1", act=sabotage.fail)
    broken.shapes[read_shapes(SEVERAL[1], wanted_batch(normed))] = cast(Program, rest)
    with piper.launch(broken) as run:
        for batch in SEVERAL[:2]:
            run.step(batch)
        with pytest.raises(WorkerError, match="BrokenError: the glass is broken") as caught:
            run.step(SEVERAL[1])
    assert "compute on stream compute: F[PP=1" in str(caught.value)


def test_one_device_alone_takes_several_shapes(normed: Program) -> None:
    with launch_single_rank(normed, "rank:1") as run:
        for batch in SEVERAL:
            run.step(batch)
        assert len(run.seconds) == 4
