"""Leaves prints, logs and warnings out of a trace: a plan runs only what computes.

Works around: torch 2.11. Dynamo refuses such calls, unless its setting names the function. It has no setting
for the methods of a logger.
Not needed from: no version yet.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pprint import pprint

import torch
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.misc import LoggingLoggerVariable

from piper.process.attributes import replaced

SILENT: tuple[Callable[..., object], ...] = (
    print,
    pprint,
    warnings.warn,
    logging.debug,
    logging.info,
    logging.warning,
    logging.error,
    logging.critical,
    logging.exception,
    logging.log,
)


@contextmanager
def leaving_out_logs() -> Iterator[None]:
    """Leave calls that print or log out of the traces inside the block."""

    def logged(variable: object, tx: object, name: str, args: object, kwargs: object) -> ConstantVariable:
        return ConstantVariable.create(None)

    with (
        replaced(LoggingLoggerVariable, "call_method", logged),
        torch._dynamo.config.patch(ignore_logging_functions={*SILENT}),
    ):
        yield
