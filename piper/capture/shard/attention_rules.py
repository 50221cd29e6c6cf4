"""Rules for attention: sharded by heads, or by the sequence with keys and values from every device.

In ring attention blocks of keys and values go round, each attended to while the next is on its way.
See [Note: ring attention] in `attention_operators.py` for why the backward comes in passes of its own.
Each step and each pass is a chunk of its own, so that the shifts between them are nodes of the plan.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import Tensor, fx
from torch.fx.node import Argument, map_aggregate, map_arg

from piper.capture.shard import flex_attention
from piper.capture.shard.attention_operators import SEQUENCE, Turn, all_keys
from piper.capture.shard.axis_sharding import NoRuleError
from piper.capture.shard.compute_rules import aligned
from piper.capture.shard.flex_attention import FLEX
from piper.capture.shard.layout import RESHAPES, CopiedShard, change, divides, tensor_of, value_of
from piper.capture.shard.loss_rules import softmax
from piper.capture.shard.shape_rules import operand
from piper.capture.shard.sharder import Rule, Sharder, aten
from piper.capture.trace.effects import argument, draws
from piper.capture.trace.graph_walks import upstream
from piper.ir.chunk import Collective
from piper.ir.sharding import REPLICATE, Shard

HEADS = 1  # dimension of [batch, heads, sequence, head size]
DOCUMENTS = torch.ops.torch_attn._varlen_attn.default  # end to end, [tokens, heads, head size]
ATTENTION_RANK = 4  # [batch, heads, queries, keys]
OTHERWISE = 'use attention="gather" there'
LARGEST = 2**26  # elements of a mask that is evaluated to see whether it is causal
CAUSAL = "piper_causal"  # under which a mask's meta keeps the answer


def attention(d: Sharder, node: fx.Node) -> None:
    """Attend: with all operands sharded by heads or samples, else by the sequence as the directive says.

    Of documents end to end, which go on from one device to the next, the sequence is exchanged for heads.
    """
    operands = [operand(node, position) for position in range(3)]
    layouts = [d.settle(x) for x in operands]
    have = next((layout for layout in layouts if isinstance(layout, Shard)), None)
    if have is None:  # the mask alone is sharded
        d.plain(node)
    elif have.dim != (0 if node.target is DOCUMENTS else SEQUENCE):
        if have.dim > HEADS:
            raise NoRuleError("it is sharded along the size of a head")
        _on_heads(d, node, operands, have)
    elif d.request.attention == "ring":
        if node.target is DOCUMENTS:
            what = "its documents lie on several devices of a ring"
            raise NoRuleError(what, 'use attention="heads" there')
        _by_ring(d, node, operands, have)
    elif d.request.attention == "heads" or node.target is DOCUMENTS:
        heads = Shard(HEADS, d.sharding.inner)  # so a device of an inner group has some of its own heads
        if not all(divides(d.shape(x)[HEADS], heads, d.degree) for x in operands):
            heads = Shard(HEADS)
        _on_heads(d, node, operands, heads)
        output = d.local[node]
        if node.target in (FLEX, DOCUMENTS):  # of several results the only one
            output = d.emit(operator.getitem, (output, 0))
        by_sequence = change(d.request.axis, d.degree, heads, have, varies=True)
        d.done(node, d.exchange(output, by_sequence), have)
    else:
        _by_queries(d, node, operands, have)


def _on_heads(d: Sharder, node: fx.Node, operands: Sequence[fx.Node], have: Shard) -> None:
    """Attend on a device's own heads or samples."""
    local = [_own_heads(d, x, operands[0], have) for x in operands]
    result = _attend(d, node, local, have)
    d.copied.discard(result)
    d.done(node, result, [have, have.at(0), REPLICATE] if node.target is DOCUMENTS else have)


def _own_heads(d: Sharder, x: fx.Node, query: fx.Node, have: Shard) -> fx.Node:
    """Return the heads of an operand that a device attends with, or its samples.

    Where there are fewer heads of keys than devices, the one that a device holds serves all its queries.
    """
    size = d.shape(x)[have.dim]
    if isinstance(d.layout(x), CopiedShard) and size != d.shape(query)[have.dim]:
        return d.local[x]
    if not divides(size, have, d.degree) or isinstance(have, CopiedShard):
        raise d.uneven_heads(size)
    return d.to(x, have, varies=True)


def _attend(
    d: Sharder, node: fx.Node, local: list[fx.Node], have: Shard, mask: fx.Node | None = None
) -> fx.Node:
    if node.target is FLEX:
        return flex_attention.attend(d, node, local, have)
    if node.target is DOCUMENTS:
        own = dict(zip((operand(node, position) for position in range(3)), local, strict=True))
        others = (x for x in node.all_input_nodes if x not in own)
        return d.replay(node, {x: d.to(x, REPLICATE, varies=True) for x in others} | own)
    mask = mask or mask_of(d, node, have)
    if draws(node):
        return _attend_and_drop(d, node, local, have, mask)
    causal = bool(argument(node, "is_causal")) and mask is None
    kwargs: dict[str, Argument] = {n: node.kwargs[n] for n in ("scale", "enable_gqa") if n in node.kwargs}
    return d.emit(node.target, (*local, mask, 0.0, causal), kwargs)


def _by_queries(d: Sharder, node: fx.Node, operands: Sequence[fx.Node], have: Shard) -> None:
    """Attend from a device's own queries to the keys and values of all devices."""
    query, key, value = operands
    own = d.to(query, have, varies=True)
    lengths, flex = [d.shape(x)[SEQUENCE] for x in (query, key)], node.target is FLEX
    prefix = not flex and is_causal(node) and have.blocks == 1 and len({*lengths}) == 1 and not draws(node)
    masked = not flex and not prefix and bool(argument(node, "is_causal"))
    rows = d.take(causal_mask(d, *lengths), have.at(0)) if masked else None
    if flex or prefix:
        key, value = unrepeated(d, key), unrepeated(d, value)
    keys, values = (d.to(x, REPLICATE, varies=True) for x in (key, value))
    if not prefix:
        d.done(node, _attend(d, node, [own, keys, values], have, rows), have)
        return
    how = (d.place(on_host=True), scale_of(d, node), all_keys(d.degree, have.zigzag).numbers)
    both = d.emit(torch.ops.piper.ring_attend.default, (own, keys, values, None, [], *how))
    d.done(node, d.emit(operator.getitem, (both, 0)), have)


def _attend_and_drop(
    d: Sharder, node: fx.Node, local: list[fx.Node], have: Shard, mask: fx.Node | None
) -> fx.Node:
    """Attend from a device's own heads or queries, and drop the weights that one device would drop.

    The weights are computed one by one, because a fused kernel draws for what it is given.
    """
    query, key, value = local
    groups = _size(query, 1) // _size(key, 1)
    if groups > 1:
        key, value = (d.emit(aten.repeat_interleave.self_int, (x, groups, 1)) for x in (key, value))
    products = d.emit(aten.matmul.default, (query, d.emit(aten.transpose.int, (key, -2, -1))))
    scores = d.emit(aten.mul.Scalar, (products, scale_of(d, node)))
    if mask is None and argument(node, "is_causal"):
        mask = causal_mask(d, _size(scores, -2), _size(scores, -1))
    if mask is not None and mask.meta["example_value"].is_floating_point():
        scores = d.emit(aten.add.Tensor, (scores, mask))
    elif mask is not None:
        scores = d.emit(aten.where.ScalarOther, (mask, scores, -math.inf))
    weights = d.emit(aten._safe_softmax.default, (scores, -1))  # a query that sees no key has zeros
    example = weights.meta["example_value"]
    shape = [int(size) for size in example.shape]
    shape[have.dim] *= d.degree
    options: dict[str, Argument] = {"dtype": example.dtype, "device": example.device}
    ones = d.emit(aten.ones.default, (shape,), options)
    own = d.take(d.emit(aten.dropout.default, (ones, argument(node, "dropout_p"), True)), have)
    return d.emit(aten.matmul.default, (d.emit(aten.mul.Tensor, (weights, own)), value))


def mask_of(d: Sharder, node: fx.Node, have: Shard) -> fx.Node | None:
    """Return a device's part of the mask that attention is given, if it is given one."""
    given = argument(node, "attn_mask")
    if not isinstance(given, fx.Node):
        return None
    return d.to(given, aligned(d, given, have, ATTENTION_RANK), varies=True)


def causal_mask(d: Sharder, queries: int, keys: int) -> fx.Node:
    """Return which keys each query attends to: those up to its own place."""
    options = {"dtype": None, "device": tensor_of(d.node).device}
    rows, columns = (d.emit(aten.arange.default, (count,), options) for count in (queries, keys))
    return d.emit(aten.ge.Tensor, (d.emit(aten.unsqueeze.default, (rows, 1)), columns))


def scale_of(d: Sharder, node: fx.Node) -> float:
    """Return what the scores of an attention are multiplied by."""
    scale = node.args[flex_attention.SCALE] if node.target is FLEX else node.kwargs.get("scale")
    return float(scale) if isinstance(scale, int | float) else 1 / math.sqrt(d.shape(operand(node))[-1])


def _size(node: fx.Node, dim: int) -> int:
    return int(node.meta["example_value"].shape[dim])


def _travelling(d: Sharder, x: fx.Node, have: Shard) -> tuple[fx.Node, list[fx.Node]]:
    """Return keys or values as they travel, and the reshapes that each reader then writes for itself."""
    x, reshapes = unrepeated(d, x), list[fx.Node]()
    if d.layout(x) != have:
        return d.to(x, have, varies=True), reshapes
    while (base := d.base(x)) is not None:
        reshapes.insert(0, x)
        x = base
    return d.local[x], reshapes


def _reshaped(d: Sharder, block: fx.Node, reshapes: Sequence[fx.Node]) -> fx.Node:
    """Write the reshapes from what arrives to what attention reads."""
    for node in reshapes:
        if node.target is aten.transpose.int:
            block = d.emit(node.target, (block, *node.args[1:]))
        else:
            shape = [int(size) for size in d.local[node].meta["example_value"].shape]
            target = node.target if node.target is aten.expand.default else aten.reshape.default
            block = d.emit(target, (block, shape))
    return block


def _by_ring(d: Sharder, node: fx.Node, operands: Sequence[fx.Node], have: Shard) -> None:
    """Attend from a device's own queries to one block of keys and values after another."""
    query, key, value = operands
    lengths = [d.shape(x)[SEQUENCE] for x in operands]
    if len(set(lengths)) > 1:
        what = f"a ring passes on as many keys as there are queries, not {lengths[1]} for {lengths[0]}"
        raise NoRuleError(what, OTHERWISE)
    if draws(node):
        raise NoRuleError("dropout inside attention does not go round a ring", OTHERWISE)
    if have.blocks > 1:
        raise NoRuleError("a ring passes on one run of the sequence", OTHERWISE)
    causal, mask = _ring_mask(d, node, have)
    own = d.to(query, have, varies=True)
    travelling, reshapes = zip(*(_travelling(d, x, have) for x in (key, value)), strict=True)
    arrived = [travelling]  # keys and values for each step
    shift = Collective(axis=d.request.axis, degree=d.degree, op="shift", back="shift_back")
    turns = [Turn(ways=d.degree, step=i, causal=causal, zigzag=have.zigzag) for i in range(d.degree)]
    how = (d.place(on_host=True), scale_of(d, node))
    result: list[fx.Node] = []  # output and log-sum-exp so far
    for turn in turns:
        if turn.step + 1 < d.degree:  # from the device before this one, which has another block then
            arrived.append(tuple(d.exchange(x, shift) for x in arrived[-1]))
        with d.chunk():
            block = [_reshaped(d, *each) for each in zip(arrived[turn.step], reshapes, strict=True)]
            fixed = [d.emit(aten.detach.default, (x,)) for x in (own, *block)]
            arguments: tuple[Argument, ...] = (*fixed, mask, list(result), *how, turn.numbers)
            both = d.emit(torch.ops.piper.ring_attend.default, arguments)
            result = [d.emit(operator.getitem, (both, index)) for index in (0, 1)]
    passed = result[0]
    for turn in turns:
        with d.chunk():
            block = [_reshaped(d, *each) for each in zip(arrived[turn.step], reshapes, strict=True)]
            arguments = (passed, own, *block, mask, *result, *how, turn.numbers)
            passed = d.emit(torch.ops.piper.ring_pass.default, arguments)
    d.done(node, passed, have)


def _ring_mask(d: Sharder, node: fx.Node, have: Shard) -> tuple[bool, fx.Node | None]:
    """Return whether the attention of a ring is causal, else the rows of its mask for a device's queries."""
    if node.target is FLEX:
        if flex_attention.changes_scores(d, node):
            raise NoRuleError("a ring does not change scores, as its score_mod does", OTHERWISE)
        return False, flex_attention.mask_rows(d, node, have)
    given = argument(node, "attn_mask")
    if is_causal(node) or not isinstance(given, fx.Node):
        return is_causal(node), None
    if d.trains(d.local[given]):
        raise NoRuleError("its mask has a gradient, which a ring does not compute", OTHERWISE)
    mask = mask_of(d, node, have)
    while mask is not None and mask.meta["example_value"].dim() < ATTENTION_RANK:
        mask = d.emit(aten.unsqueeze.default, (mask, 0))
    return False, mask


def is_causal(node: fx.Node) -> bool:
    """Return whether each query sees the keys up to its own place, by a flag or by a mask that says so."""
    mask = argument(node, "attn_mask")
    if not isinstance(mask, fx.Node):
        return bool(argument(node, "is_causal"))
    if CAUSAL not in mask.meta:
        mask.meta[CAUSAL] = _is_causal_mask(mask)
    return bool(mask.meta[CAUSAL])


def _is_causal_mask(mask: fx.Node) -> bool:
    """Evaluate a mask that depends on no input, as `transformers` makes them, and compare it."""
    example = value_of(mask)
    if not isinstance(example, Tensor) or example.dtype is not torch.bool or example.dim() < 2:
        return False
    if example.shape[-1] != example.shape[-2] or example.numel() > LARGEST:
        return False
    needed = upstream([mask])
    if not all(isinstance(node.target, torch._ops.OpOverload) for node in needed):
        return False

    host, values = torch.device("cpu"), dict[fx.Node, Any]()
    for node in mask.graph.nodes:
        if node in needed:
            given = map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = map_aggregate(given, lambda x: host if isinstance(x, torch.device) else x)
            values[node] = node.target(*args, **kwargs)
    value = values[mask]
    causal = torch.ones(example.shape[-2:], dtype=torch.bool).tril()
    return isinstance(value, Tensor) and bool((value == causal).all())


def unrepeated(d: Sharder, x: fx.Node) -> fx.Node:
    """Return keys or values before their heads are repeated for groups of heads of queries."""
    repeated, expanded = x, x.all_input_nodes[0] if x.all_input_nodes else x
    single = expanded.all_input_nodes[0] if expanded.all_input_nodes else expanded
    kinds = (
        repeated.target in RESHAPES
        and expanded.target is aten.expand.default
        and single.target is aten.unsqueeze.default
    )
    if not kinds:
        return x
    base = single.all_input_nodes[0]
    batch, heads, *rest = d.shape(base)
    apart = d.shape(expanded)
    right = len(apart) == 5 and apart[:2] == (batch, heads) and list(apart[3:]) == rest
    right = right and d.shape(single) == (batch, heads, 1, *rest)
    return base if right and d.shape(repeated) == (batch, heads * apart[2], *rest) else x


def by_heads(d: Sharder, node: fx.Node) -> None:
    """Shard attention that is sharded by the sequence already: by heads."""
    sources = [x for x in node.all_input_nodes if len(d.shape(x)) > 1]
    have = next((layout for x in sources if isinstance(layout := d.settle(x), Shard)), None)
    if have is None or have.dim != HEADS:
        raise NoRuleError("attention that is sharded by the sequence is sharded by heads alone")
    local = {x: d.local[x] for x in node.all_input_nodes}
    for x in sources:
        single = d.shape(x)[HEADS] == 1 and not isinstance(d.layout(x), CopiedShard)
        local[x] = d.to(x, REPLICATE, varies=True) if single else _own_heads(d, x, sources[0], have)
    result = d.replay(node, local)
    d.copied.discard(result)
    d.done(node, result, have)


RULES: dict[object, Rule] = {
    aten.scaled_dot_product_attention.default: attention,
    FLEX: attention,
    DOCUMENTS: attention,
    aten._safe_softmax.default: softmax,
    torch.ops.piper.ring_attend.default: by_heads,
    torch.ops.piper.ring_pass.default: by_heads,
}
