"""Compares runs on four devices, two stages on two replicas each under ZeRO-3, with plain PyTorch in fp64."""

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor, nn

from piper.compiler import Program, compile
from piper.directives import Directive, replicate, split
from piper.errors import PiperError
from piper.ir.select import at
from piper.job import Job
from piper.run.launch import launch_inline
from piper.runtime.worker import Options
from tests import plain

ROWS = 16
Data = Callable[[int, int], plain.Batch]  # (rows, seed)
PP2_DP2: list[Directive] = [
    replicate(at(PP=0), [0, 1], zero=3),
    replicate(at(PP=1), [2, 3], zero=3),
    split(at(), parts=2),
]
# Part k of every device's slice runs as microbatch k: of 16 samples on two devices, 0-3 and 8-11 come first.
MICROBATCHES = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


def program(
    model: Callable[[], nn.Module],
    loss: plain.Loss,
    data: Data,
    strategy: Sequence[Directive] = PP2_DP2,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = plain.sgd,
    rows: int = ROWS,
) -> Program:
    job = Job(
        model=model,
        loss=loss,
        data=lambda: [data(rows, 0)],
        strategy=strategy,
        optimizer=optimizer,
        precision="fp64",
    )
    return compile(job, device="cpu")


def difference(
    model: Callable[[], nn.Module],
    loss: plain.Loss,
    data: Data,
    strategy: Sequence[Directive] = PP2_DP2,
    *,
    microbatches: Sequence[Sequence[int]] = (),
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = plain.sgd,
    rows: int = ROWS,
) -> float:
    """Return the largest difference of losses, first gradients and final state after two steps."""
    batches = [data(rows, seed) for seed in range(2)]
    wanted = plain.train(model, loss, batches, microbatches=microbatches, optimizer=optimizer)
    compiled = program(model, loss, data, strategy, optimizer, rows)
    with launch_inline(compiled, Options(keep_gradients=True)) as run:
        losses = [run.step(batches[0]).loss]
        gradients = run.gradients()
        losses.append(run.step(batches[1]).loss)
        state = run.state_dict()
    loss_difference = max(abs(a - b) for a, b in zip(wanted.losses, losses, strict=True))
    return max(
        loss_difference,
        plain.largest_difference(wanted.gradients, gradients),
        plain.largest_difference(wanted.state, state),
    )


def refusal(
    error: type[PiperError],
    model: Callable[[], nn.Module],
    loss: plain.Loss,
    data: Data,
    strategy: Sequence[Directive] = PP2_DP2,
) -> str:
    """Return the message with which compiling is refused."""
    with pytest.raises(error) as caught:
        program(model, loss, data, strategy)
    return str(caught.value)
