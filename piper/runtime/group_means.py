"""Averages of what devices train, over groups that train apart, and the outer optimizer's step by them.

[Note: outer state] What lasts from one average to the next lies with the state of the optimizer that trains
each parameter, so that it is saved, loaded and copied with it: the parameters that all groups had after the
last average, the outer momentum, and what travels behind other steps, of which the parts that have arrived
are the mean. An optimizer makes its state in its first step, and ours comes behind that.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from piper.ir.averaging import AVERAGE, OuterStep
from piper.plan.groups import fragments_of
from piper.plan.instr import Instr
from piper.runtime.comm.base import Group
from piper.runtime.context import Bound, Env

AVERAGED, MOMENTUM, SENT = "average_common", "average_momentum", "average_sent"  # keys of that state


class BucketAverage:
    """The average of one bucket on one device."""

    def __init__(self, env: Env, bucket: str) -> None:
        plans, self.env, self.state, self.name = env.setup.plans, env, env.state, bucket
        assert plans.averaging is not None, "the plans say which groups train apart"
        self.averaging, self.bucket_state = plans.averaging, env.state.holdings[bucket]
        self.fragment = fragments_of(plans.buckets, plans.averaging)[bucket]
        self.first_values: dict[str, Tensor] = {}  # of parameters whose outer state is not made yet
        if self.averaging.outer_values:
            self.remember()
            env.state.renewed.append(self.remember)

    def remember(self) -> None:
        """Remember the parameters with which all groups begin, or are loaded."""
        self.first_values |= {piece: value.detach().clone() for piece, value in self.trained_pieces()}

    def trained_pieces(self) -> list[tuple[str, Tensor]]:
        """Return what the device trains of each parameter, to be read. Empty: it trains nothing of them."""
        if self.name not in self.state.segments:
            return []
        return self.bucket_state.trains.segments(self.bucket_state.trained)

    def outer_states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the state of each parameter, with its outer state. See [Note: outer state]."""
        for piece, tensor in self.state.segments.get(self.name, ()):
            assert self.state.optimizer is not None, "it trains this parameter"
            state = self.state.optimizer.state[tensor]
            if piece in self.first_values:
                first = self.first_values.pop(piece)
                if self.averaging.overlap:
                    state.setdefault(SENT, first.clone())
                if self.averaging.outer != AVERAGE:
                    state.setdefault(AVERAGED, first)
                if self.averaging.outer.momentum:
                    state.setdefault(MOMENTUM, torch.zeros_like(first))
            yield piece, state

    def take(self, mean: Tensor) -> None:
        """Take the mean of all groups, or what the outer optimizer makes of it, as the parameters."""
        new = dict(self.bucket_state.trains.segments(mean))
        for piece, state in self.outer_states() if self.averaging.outer_values else ():
            if AVERAGED in state:
                step_by(self.averaging.outer, state[AVERAGED], state.get(MOMENTUM), new[piece])
        self.bucket_state.take(mean)

    def exchange(self, group: Group, part: int) -> None:
        """Replace one of the equal parts of what travels by the mean of all groups."""
        sent = [state[SENT].view(-1) for _, state in self.outer_states()]
        of = self.averaging.overlap
        pieces = [one[len(one) * part // of : len(one) * (part + 1) // of] for one in sent]
        if pieces:
            mean = group.all_reduce(torch.cat(pieces)).div_(group.size)
            torch._foreach_copy_(pieces, list(mean.split([len(piece) for piece in pieces])))

    def merge(self) -> None:
        """Merge what has travelled into the parameters, of which a group keeps a share."""
        trained = self.bucket_state.trained.clone()
        mine = dict(self.bucket_state.trains.segments(trained))
        for piece, state in self.outer_states():
            new = state[SENT].view(mine[piece].shape)
            if AVERAGED in state:
                step_by(self.averaging.outer, state[AVERAGED], state.get(MOMENTUM), new)
            mine[piece].copy_(torch.lerp(new, mine[piece], self.averaging.keep))
        self.bucket_state.take(trained)

    def send(self) -> None:
        """Let what the device trains travel from now on."""
        mine = dict(self.trained_pieces())
        for piece, state in self.outer_states():
            state[SENT].copy_(mine[piece].detach().view(state[SENT].shape))


def average(env: Env, ins: Instr) -> Bound:
    """Average what this device trains of a bucket with its counterparts, in steps where that is due."""
    group, bucket = env.group(ins), BucketAverage(env, ins.writes[0].owner)

    def run_behind() -> None:
        part = bucket.averaging.part_sent(env.step, bucket.fragment)
        if part is not None:
            bucket.exchange(group, part)

    def run() -> None:
        if bucket.averaging.due(env.step, bucket.fragment):
            trained = bucket.bucket_state.trained
            bucket.take(group.all_reduce(trained.clone()).div_(group.size))  # peers may still read the copy
        elif bucket.first_values:
            list(bucket.outer_states())

    return run_behind if bucket.averaging.overlap else run


def merge(env: Env, ins: Instr) -> Bound:
    """Merge an average that has travelled behind other steps, and begin the next, where that is due."""
    bucket = BucketAverage(env, ins.writes[0].owner)

    def run() -> None:
        if bucket.averaging.merges(env.step, bucket.fragment):
            bucket.merge()
        if bucket.averaging.due(env.step, bucket.fragment):
            bucket.send()
        elif bucket.first_values:
            list(bucket.outer_states())

    return run


def step_by(outer: OuterStep, averaged: Tensor, momentum: Tensor | None, mean: Tensor) -> None:
    """Step the outer optimizer: its gradient is what the groups have moved away from the last average."""
    # The new parameters are written to `averaged` and to `mean`.
    gradient = averaged - mean
    if momentum is not None:
        momentum.mul_(outer.momentum).add_(gradient)
        gradient = gradient.add_(momentum, alpha=outer.momentum) if outer.nesterov else momentum
    averaged.sub_(gradient, alpha=outer.lr)
    mean.copy_(averaged)
