"""Phases of chunks, and the batch fields they start from."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from piper.ir.chunk import Chunk, Phase, PhaseSpec, Tags, bundles
from piper.ir.ids import Pass
from piper.plan.instr import Instr
from piper.plan.plan import Plans
from piper.runtime.accelerator import is_accelerator
from piper.runtime.bucket_layout import Flat, Layout, own_slice
from piper.runtime.context import Bound, Env, draw_seed, writing

Boxed = Callable[[list[object]], Sequence[Tensor]]
Members = Sequence[int | None]
ITSELF = -1  # an argument that is a whole slot, not one of several values in it


def compute(env: Env, ins: Instr) -> Bound:
    """Call one phase of a chunk."""
    phase, chunk = ins.computes.phase, env.chunks[ins.computes.chunk]
    spec = chunk.phases[phase]
    code, slots = env.setup.code(chunk, phase), env.slots
    wanted = arguments(env, ins, chunk, spec)
    single, several = results(env, ins, chunk, phase, spec)
    boxed: Boxed | None = getattr(code, "boxed", None)
    if boxed is not None and spec.in_place:
        begun = {env.at(slot) for slot in ins.adds_to}
        boxed, several = with_flat_gradients(env, chunk, spec, code, several, begun)
    else:
        assert not ins.adds_to, f"{ins.node} adds gradients to a sum, which its code cannot"
    ending = ends_with(env, ins) if boxed is not None else []

    def run() -> None:
        given = [slots[s] if i < 0 else slots[s][i] for s, i in wanted]  # type: ignore[index]
        if boxed is None:
            out: Sequence[Tensor] = code(*given)
        else:
            for slot in ending:
                slots[slot] = None
            out = boxed(given)
        for slot, i in single:
            slots[slot] = out[i]
        for slot, members in several:
            slots[slot] = [None if i is None else out[i] for i in members]

    if phase == "F" and chunk.random:
        run = seeded(env, ins, chunk, run)
    return run


def with_flat_gradients(
    env: Env,
    chunk: Chunk,
    spec: PhaseSpec,
    code: object,
    several: Sequence[tuple[int, Members]],
    begun: Collection[int],
) -> tuple[Boxed, list[tuple[int, Members]]]:
    """Return the call of a backward that writes or adds to flat gradients, and what of `several` is left."""
    boxed_into = cast("Callable[..., Sequence[Tensor]]", code.boxed_into)  # type: ignore[attr-defined]
    layouts = layouts_with(env, chunk, spec.grad_params)
    flat = [any(name in layout.index for name in spec.in_place) for layout in layouts]
    buckets = [pair for pair, fills in zip(zip(several, layouts, strict=True), flat, strict=True) if fills]
    left = [each for each, fills in zip(several, flat, strict=True) if not fills]
    slots, device, first = env.slots, env.setup.device, len(spec.grad_inputs)
    adds = bool(begun)
    kinds = [(slot, slot in begun, layout, layout.bucket.numel, layout.sums) for (slot, _), layout in buckets]
    where = {
        piece.name: (number, index)
        for number, (_, layout) in enumerate(buckets)
        for index, piece in enumerate(layout.bucket.pieces)
    }
    targets = [where[name] for name in spec.in_place]
    given_apart = [
        (*where.pop(name), first + result)
        for result, name in enumerate(spec.grad_params)
        if name in where and name not in spec.in_place
    ]
    # The code adds to all targets or to none: what only begins is zero then, and what it does not give.
    allocate = torch.zeros if adds or where.keys() - set(spec.in_place) else torch.empty
    join = torch._foreach_add_ if adds else torch._foreach_copy_

    def boxed(given: list[object]) -> Sequence[Tensor]:
        made = [
            cast(Flat, slots[slot]) if held else layout.over(allocate(size, dtype=dtype, device=device))
            for slot, held, layout, size, dtype in kinds
        ]
        out = boxed_into(given, [made[number][index] for number, index in targets], add=adds)
        if given_apart:
            apart = [made[number][index] for number, index, _ in given_apart]
            join(apart, [out[result] for _, _, result in given_apart])
        for (slot, *_), whole in zip(kinds, made, strict=True):
            slots[slot] = whole
        return out

    return boxed, left


def ends_with(env: Env, ins: Instr) -> list[int]:
    """Return the slots that a phase is the last to use, of which its own stream made the memory."""
    return [env.at(slot) for slot in ins.frees if env.makers[slot] == ins.stream]


def seeded(env: Env, ins: Instr, chunk: Chunk, run: Bound) -> Bound:
    """Draw the same numbers for the same region, microbatch and replica in a step, wherever it runs."""
    # The pieces of a region draw from one generator, in order: each reads what the one before it made. So it
    # does not matter into how many pieces collectives cut it.
    place = env.setup.plans.chunks[chunk.name].devices_for(ins.part).index(env.device)
    where = draw_place(chunk.drawer, ins.part, place // env.setup.outline.degree(chunk))
    pieces = [piece.name for piece in env.chunks.values() if piece.random and piece.drawer == chunk.drawer]
    number = pieces.index(chunk.name)

    def draw() -> None:
        begin: int | Tensor = draw_seed(env.setup.seed, env.step, where)
        if number:
            step, begin = env.drawn[where, number]
            assert step == env.step, f"{chunk.name} draws before an earlier piece of its region"
        with env.dice.seeded(begin):
            run()
            if number + 1 < len(pieces):
                env.drawn[where, number + 1] = (env.step, env.dice.generator.get_state())

    return draw


def draw_place(drawer: str, part: Tags, replica: int) -> str:
    """Return the place where random numbers are drawn, as part of their seed."""
    return f"{drawer}/{','.join(f'{axis}={i}' for axis, i in part)}/{replica}"


def parts_of(plans: Plans, chunk: str) -> list[Tags]:
    """Return the microbatches that a chunk's forward runs on, each once, recomputed or not."""
    found: dict[Tags, None] = {}
    placed = plans.chunks[chunk]
    for device in {devices[0]: None for devices in (placed.devices, *placed.elsewhere.values())}:
        for ins in plans.of(device).instrs:
            if isinstance(ins.payload, Pass) and (ins.payload.chunk, ins.payload.phase) == (chunk, "F"):
                found[ins.payload.part] = None
    return list(found)


def arguments(env: Env, ins: Instr, chunk: Chunk, spec: PhaseSpec) -> list[tuple[int, int]]:
    """Return the slot of each argument of a phase, and its index in that slot."""
    sums = ins.adds_to
    reads = iter(env.at(slot) for slot in ins.reads if slot not in sums)
    wanted = [(next(reads), ITSELF) for _ in spec.inputs]
    found: dict[str, tuple[int, int]] = {}
    for layout in layouts_with(env, chunk, spec.params):
        slot = next(reads)
        found.update({name: (slot, i) for name, i in layout.index.items()})
    wanted += [found[name] for name in spec.params]
    wanted += [(next(reads), ITSELF) for _ in spec.buffers]
    saved: dict[int, tuple[int, int]] = {}
    for members in bundles(chunk).values():
        if set(members) & set(spec.saved):
            slot = next(reads)
            saved.update({member: (slot, i) for i, member in enumerate(members)})
    wanted += [saved[i] for i in spec.saved]
    if spec.carried:
        slot = next(reads)
        wanted += [(slot, i) for i in spec.carried]
    wanted += [(next(reads), ITSELF) for _ in spec.tangents]
    assert next(reads, None) is None, f"{ins.node} reads more than {chunk.name} takes"
    return wanted


def results(
    env: Env, ins: Instr, chunk: Chunk, phase: Phase, spec: PhaseSpec
) -> tuple[list[tuple[int, int]], list[tuple[int, Members]]]:
    """Return the slots of the results of a phase: those with one result each, then those with several."""
    writes = iter(env.at(slot) for slot in ins.writes)
    single: list[tuple[int, int]] = []
    several: list[tuple[int, Members]] = []
    if phase == "F":
        first = len(chunk.outputs)
        single += [(next(writes), i) for i in range(first)]
        several += [(next(writes), [first + i for i in members]) for members in bundles(chunk).values()]
        single += [(next(writes), first + len(chunk.saved) + i) for i in range(len(chunk.mutated))]
    else:
        first = len(spec.grad_inputs)
        single += [(next(writes), i) for i in range(first)]
        if phase == "BI" and chunk.carried:
            several.append((next(writes), [first + i for i in range(len(chunk.carried))]))
        place = {name: first + i for i, name in enumerate(spec.grad_params)}
        for layout in layouts_with(env, chunk, spec.grad_params):
            several.append((next(writes), [place.get(piece.name) for piece in layout.bucket.pieces]))
    assert next(writes, None) is None, f"{ins.node} writes more than {chunk.name} gives"
    return single, several


def layouts_with(env: Env, chunk: Chunk, names: Sequence[str]) -> list[Layout]:
    """Return the layouts of a chunk's buckets that hold some of its parameters."""
    return [
        layout
        for layout in env.layouts.values()
        if chunk.name in layout.bucket.chunks and any(name in layout.index for name in names)
    ]


def load(env: Env, ins: Instr) -> Bound:
    """Bring this device's rows of a batch field, for one microbatch, to the device."""
    dtype, device = env.setup.dtype, env.setup.device

    def bring() -> Tensor:
        part = own_rows(env, ins)
        wanted = dtype if part.dtype.is_floating_point else part.dtype
        if part.device.type == "cpu" and is_accelerator(device):
            # From pinned memory, so that the host need not wait until the stream gets to it.
            return part.pin_memory().to(device, non_blocking=True).to(wanted)
        return part.to(device, wanted, copy=True)  # the batch is not ours to keep

    return writing(env, ins, bring)


def own_rows(env: Env, ins: Instr) -> Tensor:
    """Return what a device loads of a batch field: its rows of a microbatch, and its slice of these."""
    value = env.batch[ins.loads.name]
    parts = [value[low:high] for low, high in rows(env, ins, len(value))]
    part = parts[0] if len(parts) == 1 else torch.cat(parts)
    if not (shardings := ins.loads.slices):
        return part
    return own_slice(part, shardings, ins.loads.devices.index(env.device)).contiguous()


def rows(env: Env, ins: Instr, samples: int) -> list[tuple[int, int]]:
    """Return the ranges of samples of a device's microbatch: the same piece of each of the device's cells."""
    return slices(env.setup.plans, samples, *ins.loads.slice_of(env.device), ins.loads.part)


def slices_of(plans: Plans) -> int:
    """Return the number of equal slices that the samples of a batch must divide into."""
    return plans.cells * math.prod(plans.axes.values())


def slices(plans: Plans, samples: int, position: int, count: int, part: Tags) -> list[tuple[int, int]]:
    """Return the samples of a microbatch on the device at `position` of `count`, adjacent ranges joined."""
    cell = samples // plans.cells
    piece = cell // math.prod(plans.axes[axis] for axis, _ in part)
    number = 0
    for axis, i in part:
        number = number * plans.axes[axis] + i
    cells = range(position * plans.cells // count, (position + 1) * plans.cells // count)
    return merged_spans((i * cell + number * piece, i * cell + (number + 1) * piece) for i in cells)


def merged_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans in order, with those that touch or overlap merged."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found
