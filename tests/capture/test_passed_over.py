"""Models that print, log, warn and checkpoint in their forward are captured, and train as in plain PyTorch."""

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import piper
from piper.capture.quirks.cached_properties import reading_cached_properties
from piper.check.check import check
from piper.run.launch import launcher
from tests import plain

log = logging.getLogger("model")


class Talking(nn.Module):
    """Layers, each checkpointed in one of torch's two ways, and everything that a forward can say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad = True
        for number, layer in enumerate(self.layers):
            print("layer", number, x.shape, x)  # noqa: T201
            log.info("layer %d", number)
            log.warning("mean %s", x.mean())
            logging.debug("layer")
            warnings.warn(f"layer {number}", stacklevel=1)
            x = checkpoint(
                lambda value, layer=layer: self.drop(layer(value)).tanh(), x, use_reentrant=number == 0
            )
        return x


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    result: Tensor = model(batch["x"].clone()).square().mean()
    return result


def job(*strategy: piper.Directive) -> piper.Job:
    data = [{"x": torch.arange(16.0).view(4, 4) / 16}]
    model = lambda: piper.annotate_layers(Talking())  # noqa: E731
    return piper.Job(model=model, loss=loss, data=lambda: data, strategy=strategy, precision="fp64")


@pytest.mark.filterwarnings("ignore:layer")
def test_what_a_forward_says_and_checkpoints_is_passed_over(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    made = job(*piper.strategies.pipeline(layers=2, pp=2, microbatches=2))
    program = piper.compile(made)
    batch = next(iter(made.data()))
    with piper.launch(program) as run:
        run.step(batch)
    said = [record.message for record in caplog.records if not record.name.startswith("torch")]
    assert (capsys.readouterr().out, said) == ("", [])
    assert program.warnings == (
        "the model asks to recompute activations with torch.utils.checkpoint (test_passed_over.py:38, 2 "
        "times). Here the strategy says what is recomputed: add piper.remat(piper.at(), budget=0)",
    )
    report = check(program, lambda started, options: launcher(started, "inline", options), [batch])
    assert report.ok, report.first_bad


def test_a_strategy_that_recomputes_answers_the_checkpoints() -> None:
    assert piper.compile(job(piper.remat(piper.at(), budget=0))).warnings == ()


class Counting(nn.Module):
    """A layer whose forward changes its buffers by `+=` and by assigning what an in-place method returns."""

    steps: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.mean = self.mean.mul_(0.5).add_(self.steps)
        result: Tensor = self.layer(x) * self.mean
        return result


def train_as_plain(
    model: Callable[[], nn.Module], batch: dict[str, Tensor], *, steps: int
) -> dict[str, Tensor]:
    """Train on two devices, compare every loss and the state with plain PyTorch, and return the state."""
    made = piper.Job(
        model=model,
        loss=loss,
        data=lambda: [batch],
        strategy=[piper.replicate(piper.at(), [0, 1], zero=3)],
        optimizer=plain.sgd,
        precision="fp64",
    )
    wanted = plain.train(model, loss, [batch] * steps)
    with piper.launch(piper.compile(made)) as run:
        losses = [run.step(batch).loss for _ in range(steps)]
        state = run.state_dict()
    assert losses == pytest.approx(wanted.losses, rel=1e-9)
    assert plain.largest_difference(wanted.state, state) < 1e-9
    return state


def test_a_buffer_may_be_changed_by_an_assignment_in_place() -> None:
    """`self.steps += 1` changes the buffer in place and assigns it to itself: nothing is replaced."""
    batch = {"x": torch.arange(16.0).view(4, 4) / 16}
    state = train_as_plain(Counting, batch, steps=3)
    assert int(state["steps"]) == 3


class Translating(nn.Module):
    """torch's own encoder and decoder, with a causal mask that is not said to be one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        result: Tensor = self.layers(x, x.flip(1), src_mask=mask, tgt_mask=mask)
        return result


def test_a_mask_of_torchs_transformer_is_not_compared_with_a_causal_one() -> None:
    batch = {"x": torch.arange(48.0).view(4, 3, 4).cos()}
    train_as_plain(Translating, batch, steps=2)


class Asking(nn.Linear):
    """Asks what its weight is, as layers of DoRA do of weights that may be quantized."""

    def forward(self, x: Tensor) -> Tensor:
        kind = type(self.weight)
        if kind.__module__.startswith("torchao.") or kind.__name__.lower() != "parameter":
            return x
        return super().forward(x)


def test_a_forward_may_ask_what_its_weights_are() -> None:
    batch = {"x": torch.arange(16.0).view(4, 4) / 16}
    train_as_plain(lambda: Asking(4, 4), batch, steps=2)


class Padding(nn.Linear):
    """Reads a cached property, which in Python 3.11 takes a lock."""

    @cached_property
    def factor(self) -> int:
        return self.in_features - 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def test_a_forward_may_read_a_cached_property() -> None:
    batch = {"x": torch.arange(16.0).view(4, 4) / 16}
    train_as_plain(lambda: Padding(4, 4), batch, steps=2)


def test_what_is_not_traced_keeps_its_cached_properties() -> None:
    class Counted:
        @cached_property
        def made(self) -> object:
            return object()

    counted = Counted()
    with reading_cached_properties():
        first = counted.made
        assert counted.made is first
    assert counted.made is first


class Borrowing(nn.Module):
    """Calls a layer of a model of transformers without that model, whose recorders hook into it."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        sizes = {"hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
        self.lender = LlamaModel(LlamaConfig(vocab_size=3, **sizes))

    def forward(self, x: Tensor) -> Tensor:
        places = self.lender.rotary_emb(x, torch.arange(x.shape[1])[None])
        result: Tensor = self.lender.layers[0](x, position_embeddings=places)
        return result


def test_a_forward_may_call_a_layer_of_a_model_of_transformers() -> None:
    batch = {"x": torch.arange(48.0).view(4, 3, 4).cos()}
    train_as_plain(Borrowing, batch, steps=1)
