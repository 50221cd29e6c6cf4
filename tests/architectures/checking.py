"""Checks one architecture at PP2 x DP2, zero=3: the numbers of one device, or the message that refuses it."""

from torch import nn

import piper
from piper.check.check import check
from piper.errors import PiperError
from piper.run.launch import launcher
from tests.architectures.table import Architecture

STEPS, MICROBATCHES = 2, 2


def job_of(made: Architecture) -> piper.Job:
    """Return the job that trains an architecture as a user would: no edit of the model, one line of strategy."""

    def model() -> nn.Module:
        return piper.annotate_layers(made.build())

    return piper.Job(
        model=model,
        loss=piper.losses.huggingface,
        data=lambda: [made.batch(seed) for seed in range(STEPS)],
        strategy=piper.strategies.pipeline(
            layers=made.layers, pp=2, dp=2, zero=3, schedule="1f1b", microbatches=MICROBATCHES
        ),
        precision="fp64",
    )


def outcome(made: Architecture, on: str = "inline") -> str:
    """Return "the numbers of one device", what differs, or the first line of a refusal."""
    job = job_of(made)
    try:
        program = piper.compile(job)
        report = check(program, lambda started, options: launcher(started, on, options), list(job.data()))
    except PiperError as error:
        return f"refused: {error.what}"
    return PASSES if report.ok else f"differs: {report.first_bad}"


PASSES = "the numbers of one device"
