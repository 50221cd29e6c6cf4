"""Checks the collectives inside sharded regions: each does what its chunk says, over groups of its axis."""

from functools import partial

from piper.ir.devices import show
from piper.ir.sharding import Collective
from piper.plan.instr import Collecting
from piper.plan.plan import Comm
from piper.proof.decode import collected, described, shown_collective
from piper.proof.local_rules import LocalRules
from piper.proof.symbolic_state import ProgramInstr, SymbolicState


class Collectives:
    """Runs the collectives of sharded regions on symbolic values."""

    def __init__(self, state: SymbolicState, local: LocalRules) -> None:
        self.state, self.local, self.spec = state, local, state.spec

    def collect(self, at: ProgramInstr, comm: Comm | None) -> None:
        """Run a member of a collective: the values of its group become one value in another layout."""
        collecting = collected(at.ins)
        wanted = self._wanted(at, collecting)
        if collecting is None or wanted is None:
            return
        if wanted.op == "slice":
            self.state.complain(at, "communicates; each device should take its own part")
        elif comm is None and wanted.degree > 1:
            self.state.complain(at, f"has no communicator; it should go over {wanted.degree} devices")
        elif comm is not None:
            mesh = self.state.expected_at(at.ins.part).meshes[collecting.run.chunk]
            groups = partial(mesh.groups, wanted.axis)
            whose = f"{wanted.axis} of {collecting.run.chunk}"
            self.state.check_groups(at, comm, whose, groups)

    def take(self, at: ProgramInstr) -> None:
        """Take a device's own slice of a value that all devices of its group hold."""
        collecting = collected(at.ins)
        wanted = self._wanted(at, collecting)
        if collecting is None or wanted is None:
            return
        mesh = self.state.expected_at(at.ins.part).meshes[collecting.run.chunk]
        stride = mesh.axis(wanted.axis).stride
        if wanted.op != "slice":
            self.state.complain(at, f"takes a part by itself; it should be {shown_collective(wanted)}")
        elif (collecting.devices, collecting.stride) != (mesh.devices, stride):
            held, should = (
                f"{show(devices)}, {apart} apart"
                for devices, apart in ((collecting.devices, collecting.stride), (mesh.devices, stride))
            )
            self.state.complain(at, f"takes the parts of devices {held}; it should be {should}")

    def _wanted(self, at: ProgramInstr, collecting: Collecting | None) -> Collective | None:
        """Check a collective against the specification, and return the right one. None: it must not run."""
        backward = collecting is not None and collecting.run.phase != "F"
        expected = None
        if collecting is not None:
            of_collective = self.state.expected_at(at.ins.part).of_collective
            expected = of_collective(at.program, collecting.run.chunk, backward=backward)
        if collecting is None or expected is None:
            self.state.complain(at, f"does {described(at.ins.payload)}, which must not happen here")
            return None
        how = self.spec.chunks[collecting.run.chunk].collective
        assert how is not None, "its chunk is a collective"
        wanted = how.adjoint if backward else how
        if collecting.how != wanted:
            does, should = shown_collective(collecting.how), shown_collective(wanted)
            self.state.complain(at, f"does {does}; it should do {should}")
        self.local.follow(at, expected)
        return wanted
