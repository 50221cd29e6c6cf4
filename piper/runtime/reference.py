"""The same training on one device in plain PyTorch: what every strategy must equal."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piper.ir.chunk import Tags
from piper.runtime.chunkwise import Chunkwise, Walk
from piper.runtime.compute import parts_of, slices
from piper.runtime.setup import ProgramLike, Setup, build_model, setup_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The samples that one device sees at a time."""

    replica: int
    device: int
    part: Tags
    batch: Mapping[str, Tensor]


class Reference:
    """Trains on one device: autograd over the job's own loss, slice by slice as the strategy cuts the batch.

    A model that draws random numbers runs as its captured chunks instead, which draw those of the plan.
    """

    def __init__(self, program: ProgramLike) -> None:
        self.program, self.setup = program, setup_of(program)
        job = program.job
        self.model = build_model(job).to(self.setup.device)
        exact = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        cast(self.model, self.setup.dtype)
        self.params = dict(self.model.named_parameters())
        self.masters: dict[str, Tensor] = {}
        if job.precision == "bf16":
            self.masters = {n: exact[n].requires_grad_() for n, p in self.params.items() if p.requires_grad}
        trained = [self.masters.get(n, p) for n, p in self.params.items() if p.requires_grad]
        self.optimizer = job.optimizer(trained)
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None
        self.random = any(chunk.random for chunk in program.outline.chunks)
        self.steps = 0
        self.gradients: dict[str, Tensor] = {}
        self.grad_norm = 0.0
        self.walks: list[tuple[Slice, Walk]] = []
        self.keep_walks = False  # run chunk by chunk, and keep what each returned

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Train on one global batch; the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        self.walks = []
        loss = self._backward([*cut(self.setup, batch)])
        self.gradients = {name: p.grad.clone() for name, p in self.params.items() if p.grad is not None}
        for name, master in self.masters.items():
            gradient = self.params[name].grad
            master.grad = None if gradient is None else gradient.float()
            self.params[name].grad = None
        trained = [self.masters.get(n, p) for n, p in self.params.items() if p.requires_grad]
        limit = self.setup.clip_norm
        self.grad_norm = float(nn.utils.clip_grad_norm_(trained, float("inf") if limit is None else limit))
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                self.params[name].copy_(master)
        self.steps += 1
        return loss

    def _backward(self, parts: list[Slice]) -> float:
        """Losses and gradients of every slice; replicas after the first leave no trace in the buffers."""
        weighted = self.setup.plans.weighted
        losses: list[float] = []
        weights: list[float] = []
        before = {name: b.clone() for name, b in self.model.named_buffers()}
        kept: dict[str, Tensor] = {}
        replica = 0
        for part in parts:
            if part.replica != replica:
                kept = kept or {name: b.clone() for name, b in self.model.named_buffers()}
                restore(self.model, before)
                replica = part.replica
            loss, weight = self._forward(part)
            (loss if weighted else loss / len(parts)).backward()
            losses.append(loss.item())
            weights.append(1.0 if weight is None else weight.item())
        if kept:
            restore(self.model, kept)
        if weighted:
            for parameter in self.params.values():
                if parameter.grad is not None:
                    parameter.grad /= sum(weights)
        return sum(losses) / sum(weights)

    def _forward(self, part: Slice) -> tuple[Tensor, Tensor | None]:
        if not (self.random or self.keep_walks):
            result = self.program.job.loss(self.model, part.batch)
            return result if isinstance(result, tuple) else (result, None)
        buffers = dict(self.model.named_buffers())
        chunkwise = Chunkwise(self.setup, self.params, buffers)
        walk = chunkwise.run(part.batch, self.steps, part.part, part.replica)
        restore(self.model, buffers)
        if self.keep_walks:
            self.walks.append((part, walk))
        outline = self.setup.outline
        weight = outline.weight
        return (
            walk.outputs[outline.loss.chunk, outline.loss.index],
            None if weight is None else walk.outputs[weight.chunk, weight.index],
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer, exact."""
        found = {name: value.detach() for name, value in self.model.state_dict().items()}
        return found | {name: value.detach() for name, value in self.masters.items()}


def cut(setup: Setup, batch: Mapping[str, Tensor]) -> Iterator[Slice]:
    """The slices of a batch as the devices of the loss see them, replica by replica."""
    plans, chunk = setup.plans, setup.outline.loss.chunk
    home = plans.chunks[chunk].devices
    for replica, device in enumerate(home):
        for part in sorted(parts_of(plans, chunk)):
            fields = {}
            for name, value in batch.items():
                rows = slices(plans, len(value), replica, len(home), part)
                piece = torch.cat([value[low:high] for low, high in rows])
                fields[name] = piece.to(
                    setup.device, setup.dtype if piece.is_floating_point() else piece.dtype
                )
            yield Slice(replica=replica, device=device, part=part, batch=fields)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Bring a model's floating-point state to the type that computes; ties stay ties."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def restore(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set a model's buffers."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if buffer is not values[name]:
                buffer.copy_(values[name])
