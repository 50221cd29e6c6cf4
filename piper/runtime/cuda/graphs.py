"""Issues a device's step as one CUDA graph: captured once, replayed from then on."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from piper.plan.instr import Instr
from piper.plan.ops import Op
from piper.runtime.comm.base import CommError
from piper.runtime.compute import own_rows
from piper.runtime.context import Bound, Env, writing
from piper.runtime.cuda.graph_checks import not_static, settings
from piper.runtime.stream_executor import StreamExecutor, pause

Kernel = Callable[[Env, Instr], Bound]
Undone = tuple[int, int]  # a slot, and the number of its tensor by which the other slots stay as they were
WARM = 2  # steps issued one by one: an optimizer makes its state, kernels are chosen, peers meet


class Intake:
    """The static inputs of a device's instructions, and the kernels that read them."""

    # A graph reads the same memory in every step: the host fills it before the launch.

    def __init__(self) -> None:
        self.fills: list[Bound] = []
        self.rates: list[Rates] = []
        self.capturing = False  # what fails meanwhile fails because it needs the host

    def kernels(self, kernels: Mapping[Op, Kernel]) -> dict[Op, Kernel]:
        """Return the kernels, of which those that take something from the host take it from static memory."""
        return {**kernels, "load": self.load, "update": self.update(kernels["update"])}

    def load(self, env: Env, ins: Instr) -> Bound:
        """Bring this device's rows of a batch field, for one microbatch, to the device."""
        dtype, device = env.setup.dtype, env.setup.device
        room: Tensor | None = None

        def fill() -> None:
            nonlocal room
            part = own_rows(env, ins)
            if room is None:  # every batch is like the first one
                pinned = part.device.type == "cpu" and device.type == "cuda"
                room = torch.empty(part.shape, dtype=part.dtype, device=part.device, pin_memory=pinned)
            room.copy_(part)

        def bring() -> Tensor:
            assert room is not None, "it is filled before the step"
            wanted = dtype if room.dtype.is_floating_point else room.dtype
            return room.to(device, non_blocking=True, copy=True).to(wanted)

        self.fills.append(fill)
        return writing(env, ins, bring)

    def update(self, kernel: Kernel) -> Kernel:
        """Return an update whose learning rates are read from the device."""

        def bind(env: Env, ins: Instr) -> Bound:
            run = kernel(env, ins)
            assert env.state.optimizer is not None
            rates = Rates(env.state.optimizer, env.setup.device)
            self.rates.append(rates)

            def rated() -> None:
                env.state.captured = self.capturing
                try:
                    with rates.lent():
                        run()
                finally:
                    env.state.captured = False  # other programs use the same state

            return rated

        return bind

    def watch(self, place: int, ins: Instr, run: Bound) -> Bound:
        """Wrap an instruction so that it raises the reason if it cannot be captured."""

        def tried() -> None:
            try:
                run()
            except RuntimeError as error:
                if not self.capturing or isinstance(error, CommError | torch.OutOfMemoryError):
                    raise
                why = str(error).partition("\n")[0]
                raise not_static([f"{ins.node} needs the host: {why}"]) from error

        return tried

    def fill(self) -> None:
        """Put everything in place for the next step. The last one must be over."""
        for fill in self.fills:
            fill()
        for rates in self.rates:
            rates.fill()

    def settings(self) -> list[object]:
        """Return the settings that a captured graph keeps, though the host may change them."""
        return [settings(rates.optimizer) for rates in self.rates]


class Rates:
    """An optimizer's learning rates where a graph can read them, one for each group of parameters."""

    # Outside of a step the optimizer has them as numbers, as schedulers and checkpoints expect. On the device
    # they are single precision: torch's fused kernels read no other.

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        count, on_device = len(optimizer.param_groups), device.type == "cuda"
        self.host = torch.zeros(count, pin_memory=on_device)
        self.here = torch.zeros(count, device=device)
        if on_device:  # it keeps its step counts there, before it has counted anything
            for group in optimizer.param_groups:
                if "capturable" in group:
                    group["capturable"] = True
            # torch warns of a step that is not captured; the first ones are not.
            optimizer._warned_capturable_if_run_uncaptured = True

    def fill(self) -> None:
        """Take the rates that the optimizer has now."""
        self.host.copy_(torch.tensor([float(group["lr"]) for group in self.optimizer.param_groups]))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the optimizer read its rates from the device."""
        self.here.copy_(self.host, non_blocking=True)
        groups = self.optimizer.param_groups
        own = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, self.here.unbind(), strict=True):
                group["lr"] = rate
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate


class GraphExecutor:
    """Runs a plan as `StreamExecutor` does in its first steps, then as one graph of all that it issues."""

    # Memory comes from a pool of the graph's own, in which slots follow each other as in a step. What a step
    # replaces rather than writes in place (buffers, the sums) is copied back, for the next replay to find it.

    def __init__(
        self,
        inner: StreamExecutor,
        intake: Intake,
        residents: Sequence[int],  # the slots that outlive a step
        undone: Undone | None = None,  # says in a replay whether the others of these stay as they were
    ) -> None:
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
        """Discard the graph, because the state lies elsewhere now or changes in another way."""
        # The next steps are issued one by one again: an optimizer that makes its state while it is captured
        # would make it again in every replay.
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
    """Copy what has been replaced to where it was; only the slot of `undone` where that number is above 0."""
    total, number = undone or (-1, 0)
    stays = None if undone is None else cast(Tensor, slots[total])[number] > 0
    for slot, value in before.items():
        now = slots[slot]
        if now is not value and isinstance(value, Tensor) and isinstance(now, Tensor):
            value.copy_(now if stays is None or slot == total else torch.where(stays, value, now))
            slots[slot] = value
