"""`offload`: keep activations, or the optimizer's state, in memory of the host."""

from dataclasses import dataclass, replace

from piper.directives.base import SIZE, ChunkDirective, argument, one_of, registered, whole
from piper.directives.remat import saving_chunks
from piper.ir.chunk_options import HostCopies
from piper.ir.graph import Graph
from piper.ir.node import Compute

STREAM = "host"


@registered(9)
@dataclass(frozen=True, slots=True, repr=False)
class Offload(ChunkDirective):
    """Keep activations, or the optimizer's state, of the selected regions in memory of the host.

    what: "activations", until their backward reads them; "optimizer", until the next update of each bucket.
    stream: copies out run on `stream`.out, copies back on `stream`.in. least_mb: values of fewer MiB stay.
    ahead: how many compute nodes of a device each copy may take; a value that is read again before both
    copies could be over stays.

    F[PP=0 MB=0] --480 MB----------------------------------------------> B[PP=0 MB=0]
    -->
    F[PP=0 MB=0] --480 MB--> offload      (on the host)      fetch --480 MB--> B[PP=0 MB=0]
    """

    what: str = argument(
        one_of("activations", "optimizer"), default="activations", hint='"optimizer" means its state'
    )
    to: str = argument(one_of("host"), default="host", hint="there is no other memory to offload to")
    stream: str | None = None
    least_mb: float = argument(SIZE, default=1.0, hint="values that are smaller stay on the device")
    ahead: int = argument(whole(1), default=1, hint="each copy may take so many compute nodes of the device")

    def decide(self, graph: Graph, nodes: list[Compute], number: int) -> Graph:
        names = saving_chunks(graph, nodes, self.at)
        copies = HostCopies(
            stream=self.stream or STREAM, least=int(self.least_mb * 2**20), ahead=self.ahead, by=number
        )
        if self.what == "activations":
            return graph.with_options(names, lambda _, options: replace(options, offload=copies))
        return graph.with_options(names, lambda _, options: replace(options, offload_state=copies))


offload = Offload
