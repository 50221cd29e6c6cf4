"""Reads the payloads of instructions and the ids of slots as the runtime reads them."""

from piper.ir.ids import Pass
from piper.plan.instr import Instr
from piper.plan.ops import OfBucket, Payload, Routing, Rows
from piper.plan.text import show_payload


def subject(ins: Instr) -> Payload:
    """Return what an instruction is about, without its microbatch. Members of a collective agree on it."""
    match ins.payload:
        case Routing(run=run, outward=outward):
            return Routing(run=Pass(phase="F", chunk=run.chunk), outward=outward)
        case OfBucket(bucket=bucket):
            return OfBucket(bucket=bucket)
    return ins.payload


def described(payload: Payload) -> str:
    """Describe what an instruction is about, as its line does."""
    return " ".join(show_payload(payload)) or "nothing"


def rows_of(ins: Instr) -> tuple[int, int, int]:
    """Return the rows that a send or a copy takes: first, end, and the number of equal parts."""
    rows = ins.payload
    return (rows.start, rows.stop, rows.of) if isinstance(rows, Rows) else (0, 1, 1)


def bucket_named(ins: Instr) -> str:
    """Return the bucket that a gather or a reduction names."""
    return ins.payload.bucket if isinstance(ins.payload, OfBucket) else ""
