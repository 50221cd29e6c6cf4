"""One instruction of a plan: what to run, on which stream, from which slots into which."""

from dataclasses import dataclass

from piper.ir.ids import Pass, SlotId, Tags
from piper.plan.ops import PAYLOADS, TRAVELS, Collecting, Field, OfBucket, OfPass, Op, Payload, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Instr:
    """One instruction of a plan. The plan makes all decisions; the runtime only executes it."""

    op: Op
    node: str  # where it comes from in the graph
    stream: str
    reads: tuple[SlotId, ...] = ()
    writes: tuple[SlotId, ...] = ()
    frees: tuple[SlotId, ...] = ()
    waits: tuple[int, ...] = ()  # events of other streams, before it starts
    signals: int | None = None  # its own event, when another stream waits for it
    comm: str | None = None
    payload: Payload = None  # what its op needs beyond its slots
    nbytes: int = 0  # what it moves
    workspace: int = 0  # memory only it uses while it runs, less what it frees before it makes its results

    @property
    def run(self) -> Pass | None:
        """Return the pass that this instruction runs or works for. None: it belongs to no pass."""
        match self.payload:
            case Pass() as run:
                return run
            case OfPass(run=run) | OfBucket(run=run):
                return run
        return None

    @property
    def part(self) -> Tags:
        """Return the microbatch of a load, or of the one pass that it is about. Empty: it has none."""
        match self.payload:
            case Pass(part=part) | Field(part=part):
                return part
            case OfPass(run=run):
                return run.part
        return ()

    @property
    def again(self) -> bool:
        """Return whether this is a recomputed forward."""
        return isinstance(self.payload, Pass) and self.payload.again

    @property
    def fits_its_operation(self) -> bool:
        """Return whether the payload is of the kind that the operation needs. All rows need no payload."""
        needed = PAYLOADS.get(self.op)
        whole = self.payload is None and needed in (None, Rows)
        return whole or (needed is not None and isinstance(self.payload, needed))

    @property
    def travels_as(self) -> Op:
        """Return the operation that moves the bytes: this one, or the collective of a sharded region."""
        if self.op != "collect":
            return self.op
        return TRAVELS[self.collects.how.op]

    @property
    def does(self) -> str:
        """Return the operation in one word. For a collective inside a region, it is the collective's name."""
        return self.collects.how.op if self.op == "collect" else self.op

    @property
    def computes(self) -> Pass:
        """Return the pass of a compute instruction."""
        assert isinstance(self.payload, Pass), f"{self.node} computes nothing"
        return self.payload

    @property
    def adds_to(self) -> tuple[SlotId, ...]:
        """Return the sums to which a compute instruction adds the gradients that it computes."""
        if self.op != "compute":
            return ()
        return tuple(slot for slot in self.writes if slot.kind == "grad" and slot in self.reads)

    @property
    def collects(self) -> Collecting:
        """Return the payload of a collective inside a region."""
        assert isinstance(self.payload, Collecting), f"{self.node} is no collective"
        return self.payload

    @property
    def loads(self) -> Field:
        """Return the field of a load instruction."""
        assert isinstance(self.payload, Field), f"{self.node} loads nothing"
        return self.payload

    @property
    def bucket(self) -> str:
        """Return the bucket that this instruction gathers or reduces."""
        assert isinstance(self.payload, OfBucket), f"{self.node} is about no bucket"
        return self.payload.bucket
