"""The reference of groups that train apart: a plain model and optimizer for each, averaged in a loop."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from piper.check.reference import Reference, samples_in
from piper.check.replay import ReplayError
from piper.ir.averaging import Averaging
from piper.plan.groups import fragments_of, of_first_group
from piper.runtime.batch import COUNTS, as_run, wanted_batch
from piper.runtime.setup import ProgramLike


class GroupProgram:
    """The program of one group, as if there were no others."""

    def __init__(self, program: ProgramLike, averaging: Averaging) -> None:
        self._program, self._averaging = program, averaging
        self.plans = of_first_group(program.plans, averaging)

    def __getattr__(self, name: str) -> object:
        return getattr(self._program, name)

    def shaped(self, batch: Mapping[str, Tensor]) -> "GroupProgram":
        """Return the program for another shape of a group's batches."""
        rows = {name: torch.cat([field] * len(self._averaging.groups)) for name, field in batch.items()}
        return GroupProgram(self._program.shaped(rows), self._averaging)


class GroupsReference(Reference):
    """Trains each group by itself on its part of the batch. Its numbers are those of the first group."""

    def __init__(self, program: ProgramLike, averaging: Averaging, *, sliced: bool, exact: bool) -> None:
        of_group: ProgramLike = GroupProgram(program, averaging)  # type: ignore[assignment]  # by `__getattr__`
        super().__init__(of_group, sliced=sliced, exact=exact)
        self.averaging = averaging
        self.of_all, self.wanted_of_all = program, wanted_batch(program)
        self.others = [Reference(of_group, sliced=sliced, exact=exact) for _ in averaging.groups[1:]]
        buckets = program.plans.buckets
        dealt = fragments_of(buckets, averaging).items()
        fragments = {piece.name: number for bucket, number in dealt for piece in buckets[bucket].pieces}
        names = [name for name, parameter in self.params.items() if parameter.requires_grad]
        self.averaged: list[dict[int, Tensor]] = [{} for _ in range(averaging.fragments)]
        for place, name in enumerate(names):
            if name in fragments:
                self.averaged[fragments[name]][place] = self.trained[place].detach().clone()
        self.sent: list[dict[int, Tensor]] = [{} for _ in self.averaged]  # means that travel, by place
        how = averaging.outer
        self.outer = [
            torch.optim.SGD(averaged.values(), lr=how.lr, momentum=how.momentum, nesterov=how.nesterov)
            for averaged in self.averaged
        ]
        if any(chunk.random for chunk in program.outline.chunks):
            raise ReplayError("groups that train apart draw numbers of their own")

    def own_part(self, batch: Mapping[str, Tensor], group: int = 0) -> dict[str, Tensor]:
        """Return the samples of one group: an equal share, or those in its slices of an uneven batch."""
        samples, groups = samples_in(batch), len(self.averaging.groups)
        sizes = [samples // groups] * groups
        held = as_run(self.of_all, batch, self.wanted_of_all)[0].get(COUNTS)
        if held is not None:  # of each row: the samples in its slice
            rows = int(held.sum()) // samples
            sizes = [int(part.sum()) // rows for part in held.chunk(groups)]
        first = sum(sizes[:group])
        return {name: field[first : first + sizes[group]] for name, field in batch.items()}

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Train all groups on their parts of a global batch, average if that is due, and return the loss."""
        losses, squares = list[tuple[float, float]](), 0.0
        for number, group in enumerate((self, *self.others)):
            own = self.own_part(batch, number)
            weight = weight_of(group, own)
            losses.append((Reference.step(group, own), weight))
            squares += group.grad_norm**2
        every = self.averaging.every
        for number in range(self.averaging.fragments):
            since = (self.steps - number * every // self.averaging.fragments) % every
            if since == self.averaging.overlap and (self.sent[number] or not since):
                self._merge(number, self.sent[number] or self._means(number))
            if since == 0 and self.averaging.overlap:
                self.sent[number] = self._means(number)
        self.grad_norm = math.sqrt(squares / len(losses))
        return sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses)

    def _means(self, fragment: int) -> dict[int, Tensor]:
        """Return the mean of all groups' parameters of a fragment, as they are now, by their places."""
        groups = (self, *self.others)
        places = self.averaged[fragment]
        return {i: torch.stack([group.trained[i].detach() for group in groups]).mean(0) for i in places}

    @torch.no_grad()
    def _merge(self, fragment: int, means: Mapping[int, Tensor]) -> None:
        """Move the last average of a fragment by means of the groups', and merge them in all groups."""
        groups, keep = (self, *self.others), self.averaging.keep
        for place, averaged in self.averaged[fragment].items():
            averaged.grad = averaged - means[place]
        self.outer[fragment].step()
        for place, averaged in self.averaged[fragment].items():
            for group in groups:
                group.trained[place].copy_(keep * group.trained[place] + (1 - keep) * averaged)
        for group in groups:
            for name, master in group.masters.items():
                group.params[name].copy_(master)


def weight_of(reference: Reference, batch: Mapping[str, Tensor]) -> float:
    """Return how much the loss of a batch counts: its weight, or the number of its samples for a mean."""
    with torch.no_grad(), reference.unchanged():
        result = reference.loss(reference.on_device(batch))
    return float(result[1]) if isinstance(result, tuple) else float(samples_in(batch))


def reference_of(program: ProgramLike, *, sliced: bool = False, exact: bool = False) -> Reference:
    """Return plain PyTorch as a program is to train: on one device, or a model for each group."""
    averaging = program.plans.averaging
    if averaging is None:
        return Reference(program, sliced=sliced, exact=exact)
    return GroupsReference(program, averaging, sliced=sliced, exact=exact)
