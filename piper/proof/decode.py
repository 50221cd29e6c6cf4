"""Reads the payloads of instructions and the ids of slots as the runtime reads them.

So a plan that names the wrong chunk, rows, bucket or slot is refused.
"""

from piper.ir.ids import Pass
from piper.ir.sharding import Collective, Shard
from piper.plan.instr import Instr
from piper.plan.ops import Adding, Collecting, Field, OfBucket, OfChunk, Payload, Routing, Rows


def subject(ins: Instr) -> Payload:
    """Return what an instruction is about, without its microbatch. Members of a collective agree on it."""
    match ins.payload:
        case Routing(run=run, outward=outward):
            return Routing(run=Pass(phase="F", chunk=run.chunk), outward=outward)
        case OfBucket(bucket=bucket):
            return OfBucket(bucket=bucket)
    return ins.payload


def described(payload: Payload) -> str:
    """Describe what an instruction is about, for a complaint."""
    match payload:
        case Adding(run=run):
            return f"sum of {run}"
        case Field(name=name):
            return f"field {name}"
        case Rows(start=start, stop=stop, of=of):
            return f"{start}:{stop}/{of}"
        case Routing(run=run, outward=outward):
            return f"{'out' if outward else 'back'} for {run}"
        case Collecting(run=run, how=how):
            return f"{shown_collective(how)} for {run}"
        case OfBucket(bucket=bucket):
            return bucket
        case OfChunk(chunk=chunk):
            return chunk
    return "nothing" if payload is None else str(payload)


def collected(ins: Instr) -> Collecting | None:
    """Return the collective inside a region that an instruction runs. None: it runs none."""
    payload = ins.payload if isinstance(ins.payload, Collecting) else None
    return payload if payload is not None and payload.run.phase != "BW" and not payload.run.again else None


def shown_collective(how: Collective) -> str:
    """Describe a collective inside a region."""
    joined = f", joined along {_shown_shard(how.joined)}" if how.joined else ""
    cut = f", cut along {_shown_shard(how.cut)}" if how.cut else ""
    return f"{how.op} over {how.axis} {how.degree}{joined}{cut}"


def _shown_shard(shard: Shard) -> str:
    blocks = f" in {shard.blocks} blocks" if shard.blocks > 1 else ""
    return f"dimension {shard.dim}{blocks}{' zigzag' if shard.zigzag else ''}"


def routed(ins: Instr) -> Routing | None:
    """Return how counts or an exchange move rows. None: the instruction moves none."""
    return ins.payload if isinstance(ins.payload, Routing) else None


def rows_of(ins: Instr) -> tuple[int, int, int]:
    """Return the rows that a send or a copy takes: first, end, and the number of equal parts."""
    rows = ins.payload
    return (rows.start, rows.stop, rows.of) if isinstance(rows, Rows) else (0, 1, 1)


def bucket_named(ins: Instr) -> str:
    """Return the bucket that a gather or a reduction names."""
    return ins.payload.bucket if isinstance(ins.payload, OfBucket) else ""
