"""Checkpoints of divided parameters hold whole tensors: any layout goes on from any other."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from piper.checkpoint.huggingface import export_hf, import_hf
from piper.compiler import compile
from piper.directives import place, shard, split
from piper.ir.select import at
from piper.job import Job
from piper.models import decoder
from piper.run.launch import launch_inline
from tests.checkpoint.jobs import equal_bits
from tests.runtime.divided import FIELDS, batches, job, tensor, zero
from tests.runtime.divided import MODELS as DIVIDED


def under(name: str) -> Job:
    """Return our decoder under a strategy, with momentum, which is checkpointed too."""
    model = DIVIDED["decoder"]()
    strategies = {
        "tp2-dp2-zero3": zero(model, 3),
        "sp2": tensor(model, between=1),
        "pp2": [
            *(place(at(PP=stage), [stage]) for stage in range(2)),
            split(at(), axis="MB", parts=2),
        ],
        "one": [],
        "cp2": [shard(at(), [0, 1], axis="CP", batch=FIELDS, balance="zigzag")],
    }
    sizes = decoder.Config.tiny(layers=2, stages=2)
    return replace(
        job("decoder", "tp2"),
        model=lambda: decoder.Decoder(sizes),
        strategy=strategies[name],
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )


@pytest.fixture(scope="module")
def saved(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, Tensor], float, dict[str, Tensor]]:
    """Train two steps, save, and train one more: the folder, the state, the next loss, the state after it."""
    folder = tmp_path_factory.mktemp("divided") / "checkpoint"
    given = batches(3)
    with launch_inline(compile(under("tp2-dp2-zero3"), device="cpu")) as run:
        for batch in given[:2]:
            run.step(batch)
        run.save(folder)
        state = {name: value.clone() for name, value in run.state_dict().items()}
        loss = run.step(given[2]).loss
        return folder, state, loss, run.state_dict()


@pytest.mark.parametrize("name", ["one", "cp2", "tp2-dp2-zero3", "pp2", "sp2"])
def test_another_layout_goes_on_from_a_divided_one(
    name: str, saved: tuple[Path, dict[str, Tensor], float, dict[str, Tensor]]
) -> None:
    folder, state, loss, last = saved
    with launch_inline(compile(under(name), device="cpu")) as run:
        run.load(folder)
        assert equal_bits(run.state_dict(), state)
        assert abs(run.step(batches(3)[2]).loss - loss) < 1e-9
        for key, value in run.state_dict().items():
            torch.testing.assert_close(value, last[key], rtol=1e-9, atol=1e-9)


def test_a_divided_layout_goes_on_from_one_device(tmp_path: Path) -> None:
    given = batches(2)
    with launch_inline(compile(under("one"), device="cpu")) as run:
        run.step(given[0])
        run.save(tmp_path / "checkpoint")
        state = {name: value.clone() for name, value in run.state_dict().items()}
        loss = run.step(given[1]).loss
        last = run.state_dict()
    with launch_inline(compile(under("tp2-dp2-zero3"), device="cpu")) as run:
        run.load(tmp_path / "checkpoint")
        assert equal_bits(run.state_dict(), state)
        assert abs(run.step(given[1]).loss - loss) < 1e-9
        for key, value in run.state_dict().items():
            torch.testing.assert_close(value, last[key], rtol=1e-9, atol=1e-9)


def test_a_divided_model_is_exported_to_transformers(tmp_path: Path) -> None:
    """Query, key and value of a GPT-2 are one weight, divided in three blocks."""
    made = job("gpt2", "tp2")
    config = made.model().config
    with launch_inline(compile(made, device="cpu")) as run:
        run.step(batches(1)[0])
        state = run.state_dict()
    export_hf(state, config, tmp_path / "out")
    again = import_hf(tmp_path / "out")
    assert len(again) > 20
    assert equal_bits(dict(again), {name: state[name] for name in again})
    plain = made.model().double()
    plain.load_state_dict({name: value for name, value in state.items()})
    assert plain.get_parameter("transformer.h.0.attn.c_attn.weight").shape == (32, 96)
