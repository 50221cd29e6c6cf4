"""Traces functions that `torch.utils.checkpoint` calls as if they were called directly.

A checkpoint says what to save, not what to compute, and in Piper a strategy says that.

Works around: torch 2.11. Dynamo makes a checkpoint one operation, so the regions inside it are not seen, and
has no setting for it.
Not needed from: no version yet.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._higher_order_ops.wrap import TagActivationCheckpoint

from piper.capture.trace_errors import tracing_line
from piper.process.attributes import replaced


@contextmanager
def tracing_into_checkpoints() -> Iterator[list[str]]:
    """Trace into checkpoints inside the block. Yield the list of the lines that call them."""
    lines: list[str] = []

    def checkpointed(variable: object, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> object:  # noqa: ANN401  Dynamo's own protocol
        lines.append(tracing_line().strip(" ()"))
        _, passed = TagActivationCheckpoint.divide_kwargs(kwargs)
        return args[0].call_function(tx, args[1:], passed)

    with replaced(CheckpointHigherOrderVariable, "_call_function", checkpointed):
        yield lines
