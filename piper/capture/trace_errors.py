"""Turns torch's report on a model that cannot be captured into one clear error."""

import contextlib
import logging
import re
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._guards import TracingContext

from piper.errors import CaptureError, LossError
from piper.process.usercode import one_line

_PACKAGE = Path(__file__).parents[1]
_OURS = (
    str(_PACKAGE / "capture"),
    str(_PACKAGE / "experts.py"),
    str(Path(torch.__file__).parent),
    contextlib.__file__,  # it calls what `annotate` decorates
    "<",
)
_NOT_CAPTURED = "the model and its loss cannot be captured"
_HINT = "the loss must trace as one graph: no branch on a tensor's value, no .item(), no files inside"
_DRAW = (
    "draw with torch, in every step another number: torch.rand(()); or in data(), into a field of the batch"
)
# What Dynamo says of a call that it cannot trace, and what to write in its place
_INSTEAD = {
    r"`ContextVar`": "read the variable in the model's constructor, into an attribute; what changes from "
    "step to step belongs in the batch",
    r"`torch\.autograd\.grad`|Tensor\.backward\(": "write torch.func.grad(function)(x), which can be traced",
    r"\b(UserDefinedObjectVariable\(|torch\._C\.|module>\.)Generator\b|`manual_seed`": "draw without a "
    "generator: the job's seed decides what each step draws",
    r"\.repeat_interleave\(": "write w[torch.repeat_interleave(counts, output_size=rows.shape[0])]",
    r"\bRandom\.\w+|\b(np|numpy)\.random\.": _DRAW,
    "does not have a meta kernel": "put the call into an operator of your own: torch.library.custom_op, with "
    "register_fake and register_autograd",
}

# What Dynamo says of an exception in the traced code itself, not of code that it cannot trace
RAISED = (
    r"raised exception (\w+)\(",
    r"got (\w+)\(.*\)\s*$",
    r"(Argument mismatch) when attempting to trace",
)
# The argument of a KeyError as torch 2.11 has it; plain Python and torch 2.13 have the key alone
_FAILED_LOOKUP = re.compile(
    r"([\"'])Dict key lookup failed for ConstantVariable\(\w+: (?P<key>.+?)\)\. Debug .*\1"
)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide torch's logs and warnings about a trace."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True, action="ignore"):  # recorded: torch resets filters
            yield
    finally:
        logging.disable(before)


def refused(
    what: str, error: Exception, *, hint: str, kind: type[CaptureError] = CaptureError
) -> CaptureError:
    """Return the error that says where and why the user's code could not be traced."""
    # The traced stack comes first: the interpreter's shows only the tracer.
    traced = _users_line(getattr(error, "real_stack", None) or ())
    where = traced or _users_line(traceback.extract_tb(error.__traceback__))
    return kind(
        what,
        by=f"capture ({where})" if where else "capture",
        facts={"why": reason(error)},
        hint=hint,
    )


def loss_failed(error: Exception, fields: Iterable[str]) -> CaptureError:
    """Return the error for a loss that raised an exception, or that torch could not trace."""
    raised = [
        match.group(1) for pattern in RAISED for match in re.finditer(pattern, str(error), re.MULTILINE)
    ]
    if not raised:
        traced = str(error).split("from user code:")[0]
        hint = next((hint for said, hint in _INSTEAD.items() if re.search(said, traced)), _HINT)
        return refused(_NOT_CAPTURED, error, hint=hint, kind=LossError)
    names = ", ".join(map(repr, fields))
    hints = {"KeyError": f"the batch has {names}: use one of these names, or add the field in data()"}
    if not _users_line(getattr(error, "real_stack", ())):  # the loss was not entered
        hints["Argument mismatch"] = "the loss is called as loss(model, batch)"
    alone = "call loss(model(), batch) without Piper to see the whole traceback"
    hint = hints.get(raised[0], f"{alone}, and if that works, under torch.compile")
    return refused("the loss, or the model in it, raised an exception", error, hint=hint, kind=LossError)


def drawn_once(draw: torch.fx.Node) -> CaptureError:
    """Return the error for a number that Python drew while torch traced: it would be that of every step."""
    lines = [line for user in draw.users if (line := line_of(user))]
    return LossError(
        _NOT_CAPTURED,
        by=f"capture ({lines[0]})" if lines else "capture",
        facts={"why": "what Python's random drew for the trace would be the number of every step"},
        hint=_DRAW,
    )


def without_result(error: Exception) -> bool:
    """Return whether a trace failed because there is no operation, or the loss returns no result of one."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    raised_by = last.line or ""  # the assertion of torch 2.11 has no message
    return isinstance(error, SyntaxError) or "backend_input" in str(error) or "backend_input" in raised_by


def _users_line(stack: Iterable[traceback.FrameSummary]) -> str | None:
    """Return the innermost line of the user's code in a stack. None: there is none."""
    return _innermost([(frame.filename, frame.lineno) for frame in stack])


def _innermost(frames: Sequence[tuple[str, object]]) -> str | None:
    users = (frame for frame in reversed(frames) if not frame[0].startswith(_OURS))
    return next((f"{Path(name).name}:{line}" for name, line in users), None)


def reason(error: Exception) -> str:
    """Return the reason for an error, in one line."""
    text = str(error)
    for pattern in (r"raised exception (.+)", r"got (\w+\(.+\))\s*$", r"Explanation: (.+)"):
        if match := re.search(pattern, text, re.MULTILINE):
            raised = re.sub(r"\[ConstantVariable\(\w+: (.*?)\)\]", r"\1", match.group(1))
            return one_line(_FAILED_LOOKUP.sub(lambda match: match["key"].replace("\\'", "'"), raised))
    return one_line(f"{type(error).__name__}: {text}")


def line_of(node: torch.fx.Node) -> str | None:
    """Return the line of the user's code that a node stands for, as `llama.py:41`. None: there is none."""
    files = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return _innermost(files)


def node_line(node: torch.fx.Node) -> str:
    """Return the line of the user's code that made a node, as ` (llama.py:41)`, for errors; else nothing."""
    line = line_of(node)
    return f" ({line})" if line else ""


def tracing_line() -> str:
    """Return the line of the user's code that a trace is at, for errors: ` (llama.py:41)`, or nothing."""
    line = _users_line(TracingContext.extract_stack())
    return f" ({line})" if line else ""
