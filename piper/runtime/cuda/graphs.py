"""Issues a device's step as one CUDA graph: captured once, replayed from then on."""

import gc
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import cast

import torch
from torch import Tensor

from piper.runtime.comm.base import CommError
from piper.runtime.cuda.graph_inputs import Intake
from piper.runtime.stream_executor import StreamExecutor, pause

Undone = tuple[int, int]  # a slot, and the number of its tensor by which the other slots stay as they were
WARM = 2  # steps issued one by one: an optimizer makes its state, kernels are chosen, peers meet


class GraphExecutor:
    """Runs a plan as `StreamExecutor` does in its first steps, and as one graph afterwards.

    What is captured is the whole issue of a step: streams become branches of the graph, the plan's events its
    edges, and memory comes from a pool of the graph's own, in which slots follow each other as they do in a
    step. A replay is one call. The host only fills the intake before it, and waits for its end.

    What a step replaces rather than writes in place (buffers, the sums) is copied back to where it was, so
    that the next replay finds it.
    """

    def __init__(
        self,
        inner: StreamExecutor,
        intake: Intake,
        residents: Sequence[int],
        undone: Undone | None = None,
    ) -> None:
        """Wrap `inner`, whose first stream can be captured; `residents`: the slots that outlive a step.

        undone: says in a replay whether the others of these stay as they were. None: they never do.
        """
        self.inner, self.intake, self.residents, self.undone = inner, intake, residents, undone
        self.graph: torch.cuda.CUDAGraph | None = None
        self.settings: list[object] = []  # that the steps since the last reset were run with
        self.taken = 0  # steps since then

    def run(self) -> None:
        """Run the plan once; returns when all of it is over."""
        inner = self.inner
        with torch.cuda.device(inner.accelerator), torch.no_grad():
            outside = torch.cuda.default_stream()
            with torch.cuda.stream(outside):
                self.intake.fill()
            inner.home.wait_stream(outside)  # what was done to the state between steps was done there
            if not self.due():
                inner.run()
                return
            if self.graph is None:
                gc.collect()  # nothing is to be let go of by chance while it is captured
                self.graph = self._captured()
            self.replay()
            self._wait()

    def issue(self) -> None:
        """Run the plan once, without the graph; returns when all of it is over."""
        inner = self.inner
        before = {slot: inner.slots[slot] for slot in self.residents}
        with torch.cuda.device(inner.accelerator), torch.no_grad():
            inner.run()
            if self.graph is not None:
                put_back(inner.slots, before)

    def due(self) -> bool:
        """Count a step, and say whether it is one for the graph."""
        settings = self.intake.settings()
        if settings != self.settings:
            self.reset()
            self.settings = settings
        self.taken += 1
        return self.taken > WARM

    def reset(self) -> None:
        """Discard the graph, because the state lies elsewhere now or changes in another way.

        The next steps are issued one by one again: an optimizer that makes its state while it is captured
        would make it again in every replay.
        """
        self.graph, self.taken = None, 0

    def replay(self) -> None:
        """Launch the graph."""
        assert self.graph is not None
        with torch.cuda.stream(cast(torch.cuda.Stream, self.inner.home)):
            self.graph.replay()
        self.inner.done.record(self.inner.home)

    def _captured(self) -> torch.cuda.CUDAGraph:
        inner, graph = self.inner, torch.cuda.CUDAGraph()
        before = {slot: inner.slots[slot] for slot in self.residents}
        causes: list[Exception] = []
        self.intake.capturing = True
        try:
            # Errors of this thread alone: another may look at events of its own, as NCCL's does.
            with torch.cuda.graph(
                graph, stream=cast(torch.cuda.Stream, inner.home), capture_error_mode="thread_local"
            ):
                try:
                    inner.enqueue()
                    put_back(inner.slots, before, self.undone)
                    inner.outro()
                except Exception as error:
                    causes.append(error)
                    raise
        except Exception:
            if causes:  # to end a capture that has failed is another error, which says nothing
                raise causes[0] from causes[0].__cause__
            inner.on_failure()
            raise
        finally:
            self.intake.capturing = False
            inner.drop()
        return graph

    def _wait(self) -> None:
        """Wait until the step is over; nothing is seen of it meanwhile."""
        inner = self.inner
        begin = now = monotonic()
        if inner.alone:
            inner.done.synchronize()
            return
        while not inner.done.query():
            if (now := pause(now - begin)) - begin > inner.timeout:
                error = CommError(f"the step has not ended within {inner.timeout:g} s")
                where = "somewhere in its graph: launched without graphs, it says where"
                error.add_note(f"on device {inner.device}, {where}")
                inner.on_failure()
                raise error

    def close(self) -> None:
        """Give the graph's memory back."""
        self.reset()
        self.inner.close()


def put_back(slots: list[object], before: Mapping[int, object], undone: Undone | None = None) -> None:
    """Copy what has been replaced to where it was, on the current stream.

    undone: where this number is above 0, the slots but its own stay as they were. None: none of them does.
    """
    total, number = undone or (-1, 0)
    stays = None if undone is None else cast(Tensor, slots[total])[number] > 0
    for slot, value in before.items():
        now = slots[slot]
        if now is not value and isinstance(value, Tensor) and isinstance(now, Tensor):
            value.copy_(now if stays is None or slot == total else torch.where(stays, value, now))
            slots[slot] = value
