"""Averages of what devices train, over groups that train apart, and the outer optimizer's step by them.

[Note: common parameters] What is kept between averages lies with the state of the optimizer that trains each
parameter, so that it is saved, loaded and copied with it: the last parameters that all groups had in common,
the momentum, and what travels behind other steps, of which the parts that have arrived are the mean. An
optimizer makes its state in its first step, and ours comes behind that.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from piper.ir.averaging import AVERAGE, OuterStep
from piper.plan.groups import fragments_of
from piper.plan.instr import Instr
from piper.runtime.comm.base import Group
from piper.runtime.context import Bound, Env

COMMON, MOMENTUM, SENT = "average_common", "average_momentum", "average_sent"  # keys of its state


class BucketAverage:
    """The average of one bucket on one device."""

    def __init__(self, env: Env, bucket: str) -> None:
        plans, self.env, self.state, self.name = env.setup.plans, env, env.state, bucket
        assert plans.averaging is not None, "the plans say which groups train apart"
        self.asked, self.holding = plans.averaging, env.state.holdings[bucket]
        self.fragment = fragments_of(plans.buckets, plans.averaging)[bucket]
        self.begun: dict[str, Tensor] = {}  # by parameter: what groups have in common when they begin
        if self.asked.kept:
            self.begin()
            env.state.renewed.append(self.begin)

    def begin(self) -> None:
        """Remember the parameters that groups have in common when they begin, or are loaded."""
        self.begun |= {
            piece: value.detach().clone() for piece, value in self.state.segments.get(self.name, ())
        }

    def kept(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield what is kept for each parameter. See [Note: common parameters]."""
        for piece, tensor in self.state.segments.get(self.name, ()):
            assert self.state.optimizer is not None, "it trains this parameter"
            kept = self.state.optimizer.state[tensor]
            if piece in self.begun:
                common = self.begun.pop(piece)
                if self.asked.overlap:
                    kept.setdefault(SENT, common.clone())
                if self.asked.outer != AVERAGE:
                    kept.setdefault(COMMON, common)
                if self.asked.outer.momentum:
                    kept.setdefault(MOMENTUM, torch.zeros_like(common))
            yield piece, kept

    def take(self, mean: Tensor) -> None:
        """Take the mean of all groups, or what the outer optimizer makes of it, as the parameters."""
        new = dict(self.holding.layout.segments(mean))
        for piece, kept in self.kept() if self.asked.kept else ():
            if COMMON in kept:
                step_by(self.asked.outer, kept[COMMON], kept.get(MOMENTUM), new[piece])
        self.holding.trained.copy_(mean)
        if self.holding.master is not None:
            self.holding.own.copy_(mean)

    def exchange(self, group: Group, part: int) -> None:
        """Replace one of the equal parts of what travels by the mean of all groups."""
        sent = [kept[SENT].view(-1) for _, kept in self.kept()]
        of = self.asked.overlap
        pieces = [one[len(one) * part // of : len(one) * (part + 1) // of] for one in sent]
        if pieces:
            mean = group.all_reduce(torch.cat(pieces)).div_(group.size)
            torch._foreach_copy_(pieces, list(mean.split([len(piece) for piece in pieces])))

    def merge(self) -> None:
        """Merge what has travelled into the parameters, of which a group keeps a share."""
        mine = dict(self.state.segments.get(self.name, ()))
        for piece, kept in self.kept():
            new = kept[SENT].view(mine[piece].shape)
            if COMMON in kept:
                step_by(self.asked.outer, kept[COMMON], kept.get(MOMENTUM), new)
            mine[piece].detach().copy_(torch.lerp(new, mine[piece].detach(), self.asked.keep))
        if self.holding.master is not None:
            self.holding.own.copy_(self.holding.master)

    def send(self) -> None:
        """Let what the device trains travel from now on."""
        mine = dict(self.state.segments.get(self.name, ()))
        for piece, kept in self.kept():
            kept[SENT].copy_(mine[piece].detach().view(kept[SENT].shape))


def average(env: Env, ins: Instr) -> Bound:
    """Average what this device trains of a bucket with its counterparts, in steps where that is due."""
    group, bucket = env.group(ins), BucketAverage(env, ins.writes[0].owner)

    def run_behind() -> None:
        part = bucket.asked.part_sent(env.step, bucket.fragment)
        if part is not None:
            bucket.exchange(group, part)

    def run() -> None:
        if bucket.asked.due(env.step, bucket.fragment):
            trained = bucket.holding.trained
            bucket.take(group.all_reduce(trained.clone()).div_(group.size))  # peers may still read the copy
        elif bucket.begun:
            list(bucket.kept())

    return run_behind if bucket.asked.overlap else run


def merge(env: Env, ins: Instr) -> Bound:
    """Merge an average that has travelled behind other steps, and begin the next, where that is due."""
    bucket = BucketAverage(env, ins.writes[0].owner)

    def run() -> None:
        if bucket.asked.merges(env.step, bucket.fragment):
            bucket.merge()
        if bucket.asked.due(env.step, bucket.fragment):
            bucket.send()
        elif bucket.begun:
            list(bucket.kept())

    return run


def step_by(outer: OuterStep, common: Tensor, momentum: Tensor | None, mean: Tensor) -> None:
    """Step the outer optimizer: its gradient is what the groups have moved away from the common parameters.

    The new parameters are written to `common` and to `mean`.
    """
    gradient = common - mean
    if momentum is not None:
        momentum.mul_(outer.momentum).add_(gradient)
        gradient = gradient.add_(momentum, alpha=outer.momentum) if outer.nesterov else momentum
    common.sub_(gradient, alpha=outer.lr)
    mean.copy_(common)
