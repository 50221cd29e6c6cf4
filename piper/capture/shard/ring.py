"""Writes ring attention: blocks of keys and values go round, each attended to while the next is on its way.

See [Note: ring attention] in `attention_operators.py` for why the backward comes in passes of its own.
Each step and each pass is a chunk of its own, so that the shifts between them are nodes of the plan.
"""

import math
import operator

import torch
from torch import fx
from torch.fx.node import Argument

import piper.capture.shard.attention_operators  # noqa: F401  registers the operators
from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.block_attention import SEQUENCE, Turn
from piper.capture.shard.compute_rules import aligned
from piper.capture.shard.masks import is_causal, unrepeated
from piper.capture.shard.shape_rules import argument
from piper.capture.shard.sharder import Sharder, aten
from piper.capture.trace.effects import draws
from piper.ir.chunk import Collective
from piper.ir.sharding import Shard

OTHERWISE = 'use attention="gather" there'


def scale_of(d: Sharder, node: fx.Node) -> float:
    """Return what the scores of an attention are multiplied by."""
    query, scale = node.args[0], node.kwargs.get("scale")
    assert isinstance(query, fx.Node)
    return float(scale) if isinstance(scale, int | float) else 1 / math.sqrt(d.shape(query)[-1])


class _Block:
    """Keys or values as they travel: before reshapes, which each reader writes for itself."""

    def __init__(self, d: Sharder, x: fx.Node, have: Shard) -> None:
        self.d, self.reshapes = d, list[fx.Node]()
        x = unrepeated(d, x)
        if d.layout(x) == have:
            while (base := d.base(x)) is not None:
                self.reshapes.append(x)
                x = base
            self.arrived = [d.local[x]]
        else:
            self.arrived = [d.to(x, have, varies=True)]

    def shift(self) -> None:
        """Write the shift after which a device has the block that the device before it had."""
        d, last = self.d, self.arrived[-1]
        how = Collective(axis=d.sharding.axis, degree=d.degree, op="shift", back="shift_back")
        self.arrived.append(d.exchange(last, how))

    def read(self, step: int) -> fx.Node:
        """Write the reshapes from what arrived for a step to what attention reads."""
        made = self.arrived[step]
        for node in reversed(self.reshapes):
            if node.target is aten.transpose.int:
                made = self.d.emit(node.target, (made, *node.args[1:]))
            else:
                shape = [int(size) for size in self.d.local[node].meta["example_value"].shape]
                target = node.target if node.target is aten.expand.default else aten.reshape.default
                made = self.d.emit(target, (made, shape))
        return made


def by_ring(d: Sharder, node: fx.Node, query: fx.Node, key: fx.Node, value: fx.Node, have: Shard) -> None:
    """Attend from a device's own queries to one block of keys and values after another."""
    lengths = [d.shape(x)[SEQUENCE] for x in (query, key, value)]
    if len(set(lengths)) > 1:
        what = f"a ring passes on as many keys as there are queries, not {lengths[1]} for {lengths[0]}"
        raise NoRuleError(what, OTHERWISE)
    if draws(node):
        raise NoRuleError("dropout inside attention does not go round a ring", OTHERWISE)
    if have.blocks > 1:
        raise NoRuleError("a ring passes on one run of the sequence", OTHERWISE)
    causal, mask = is_causal(node), None
    given = argument(node, 3, "attn_mask")
    if isinstance(given, fx.Node) and not causal:
        if d.trains(d.local[given]):
            raise NoRuleError("its mask has a gradient, which a ring does not compute", OTHERWISE)
        mask = d.to(given, aligned(d, given, have, 4), varies=True)
    own, keys, values = d.to(query, have, varies=True), _Block(d, key, have), _Block(d, value, have)
    turns = [Turn(ways=d.degree, step=i, causal=causal, zigzag=have.zigzag) for i in range(d.degree)]
    how = (d.host_place(), scale_of(d, node))
    result: list[fx.Node] = []  # output and log-sum-exp so far
    for turn in turns:
        if turn.step + 1 < d.degree:
            keys.shift()
            values.shift()
        with d.chunk():
            fixed = [
                d.emit(aten.detach.default, (x,)) for x in (own, keys.read(turn.step), values.read(turn.step))
            ]
            arguments: tuple[Argument, ...] = (*fixed, mask, list(result), *how, turn.numbers)
            both = d.emit(torch.ops.piper.ring_attend.default, arguments)
            result = [d.emit(operator.getitem, (both, index)) for index in (0, 1)]
    passed = result[0]
    for turn in turns:
        with d.chunk():
            block = (keys.read(turn.step), values.read(turn.step))
            arguments = (passed, own, *block, mask, *result, *how, turn.numbers)
            passed = d.emit(torch.ops.piper.ring_pass.default, arguments)
    d.done(node, passed, have)
