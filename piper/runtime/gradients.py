"""From each backward's gradients to updated parameters: sums, reductions, the norm, the update."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from piper.ir.ids import OF_STEP
from piper.plan.instr import Instr
from piper.runtime.accelerator import is_accelerator
from piper.runtime.bucket_layout import Flat, Resharding
from piper.runtime.context import Bound, Env, writing
from piper.runtime.fp8_gathers import gather_in_fp8

BLOCK = 1024  # elements whose squares are added up in the gradient's own type


def accumulate(env: Env, ins: Instr) -> Bound:
    """Begin a sum, or add to it."""
    first = len(ins.reads) == 1
    if ins.writes[0].kind != "grad":  # losses, weights and metrics: in float64, in any precision of the model
        if first:
            return writing(env, ins, lambda value: value.to(torch.float64, copy=True).view(-1))
        return writing(env, ins, lambda value, total: total.add_(value.view(-1)))
    layout = env.layouts[ins.writes[0].owner]

    def begin(given: Flat | Sequence[Tensor | None]) -> Flat:
        # What compiled code wrote as one flat tensor has no other reader: the sum goes on in its memory.
        return given if isinstance(given, Flat) else layout.flatten(given, layout.sums)

    def add(given: Sequence[Tensor | None], total: Flat) -> Flat:
        pairs = [(t, g) for t, g in zip(total, given, strict=True) if g is not None]
        torch._foreach_add_([t for t, _ in pairs], [g for _, g in pairs])
        return total

    return writing(env, ins, begin if first else add)


def all_reduce(env: Env, ins: Instr) -> Bound:
    """Sum a gradient over the replicas, or over the copies of a tied parameter."""
    group, slots, target = env.group(ins), env.slots, env.at(ins.writes[0])
    layout = env.layouts[ins.writes[0].owner]
    whole = ins.writes[0].kind == "grad"
    length = layout.stop - layout.start
    device = env.setup.device

    def run() -> None:
        value = slots[target]
        mine = value.whole if isinstance(value, Flat) else cast(Tensor, value)
        sent = mine.to(layout.travels)
        total = group.all_reduce(sent)
        if sent is not mine:
            mine.copy_(total)
        elif total is not mine:
            slots[target] = layout.over(total) if whole else total

    def run_without() -> None:  # no backward reaches this copy: it adds nothing, but gets the sum
        total = group.all_reduce(torch.zeros(length, dtype=layout.travels, device=device)).to(layout.sums)
        slots[target] = layout.over(total) if whole else total

    return run if ins.reads else run_without


def reduce_scatter(env: Env, ins: Instr) -> Bound:
    """Sum a gradient over the replicas and keep this device's shard, added to the shard so far."""
    group, layout = env.group(ins), env.layouts[ins.bucket]
    slots, target = env.slots, env.at(ins.writes[0])
    again = ins.writes[0] in ins.reads
    value = next((env.at(slot) for slot in ins.reads if slot != ins.writes[0]), None)
    device, bucket = env.setup.device, layout.bucket
    how = next(how for how in bucket.reductions if bucket.gradient(how.gets) == ins.writes[0])

    def run() -> None:
        parts = [] if value is None else parts_of(slots[value])
        if not parts:  # no microbatch of this device gives a gradient: it adds nothing
            flat = torch.zeros(bucket.numel, dtype=layout.travels, device=device)
        elif len(parts) == 1:
            flat = parts[0].reshape(-1).to(layout.travels)
        else:
            flat = layout.flatten(parts, layout.travels).whole
        shard = layout.scatter(group, how, flat)
        if again:
            cast(Tensor, slots[target]).add_(shard)
        else:
            slots[target] = shard.to(layout.sums)

    return run


def parts_of(value: object) -> list[Tensor]:
    """Return the tensors that a gradient consists of: a flat one, a shard, or one for each piece."""
    if isinstance(value, Flat | Tensor):
        return [value.whole if isinstance(value, Flat) else value]
    return cast(list[Tensor], value)


def gather(env: Env, ins: Instr) -> Bound:
    """Bring a bucket's shards together: for a run of uses, or in place after an update of each."""
    group, layout = env.group(ins), env.layouts[ins.bucket]
    holding = env.state.holdings[ins.bucket]
    slots, target = env.slots, env.at(ins.writes[0])
    whole, updated = holding.flat, ins.reads == ins.writes
    own = holding.own if updated else whole  # what this device has updated, or all that it holds
    narrow = layout.bucket.gathered_as and not updated
    how = layout.bucket.gather_updated if updated else layout.bucket.gather_for_use
    assert how is not None, "every device has all of it"
    gather_into = (
        gather_in_fp8(layout, group, how, own) if narrow else partial(layout.gather, group, how, own)
    )

    def gather_whole() -> None:
        out = own.new_empty(layout.length)
        gather_into(out)
        slots[target] = layout.over(out)

    return partial(gather_into, whole) if updated else gather_whole


def reshard(env: Env, ins: Instr) -> Bound:
    """Bring slices of gradients to the devices that update parameters in full, or slices of these back."""
    group, holding = env.group(ins), env.state.holdings[ins.bucket]
    how = Resharding(holding.bucket, env.state.device)

    def spread() -> None:
        how.spread(group, holding.trained.detach(), holding.own)

    if ins.reads == ins.writes:
        return spread
    return writing(env, ins, lambda slices: how.assemble(group, *parts_of(slices)))


def norm(env: Env, ins: Instr) -> Bound:
    """Compute this device's terms of the step's sums; over all devices, each element counts once."""
    slots, target = env.slots, env.at(ins.writes[0])
    gradients = [slot for slot in ins.reads if slot.kind in ("grad", "grad_shard")]
    parts = [(env.at(slot), env.layouts[slot.owner].bucket.copies) for slot in gradients]
    plans, device = env.setup.plans, env.setup.device
    places, length = plans.places, sum(plans.sums.values())
    names = dict.fromkeys(slot.sum_name for slot in ins.reads if slot.sum_name in places)
    terms = {name: [env.at(slot) for slot in ins.reads if slot.sum_name == name] for name in names}

    def run() -> None:
        result = torch.zeros(length, dtype=torch.float64, device=device)
        for slot, copies in parts:
            result[places["squares"]] += squares(parts_of(slots[slot])) / copies
        for name, held in terms.items():
            term = torch.stack([cast(Tensor, slots[slot]) for slot in held]).sum(0)
            result[places[name]] = term / plans.copies if name in OF_STEP else term
        slots[target] = result

    return run


def squares(gradient: list[Tensor]) -> Tensor:
    """Return the sum of squares, exact to a rounding of its type."""
    if is_accelerator(gradient[0].device):
        norms = torch._foreach_norm(gradient, 2, dtype=at_least_single(gradient[0].dtype))
        return torch.stack(norms).double().square().sum()
    return torch.stack([squares_on_host(part.reshape(-1)) for part in gradient]).sum()


def squares_on_host(flat: Tensor) -> Tensor:
    """Return the sum of squares of one flat tensor: short blocks in its own type, then float64."""
    # Reading a float32 gradient as float64 takes several times as long as this.
    even = len(flat) - len(flat) % BLOCK
    blocks = torch.linalg.vector_norm(flat[:even].view(-1, BLOCK), dim=1, dtype=at_least_single(flat.dtype))
    rest = torch.linalg.vector_norm(flat[even:], dtype=torch.float64)
    total: Tensor = blocks.double().square().sum() + rest.square()
    return total


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """Return the type that a short sum is taken in: float32 or wider."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def total(env: Env, ins: Instr) -> Bound:
    """Compute the step's sums over all devices."""
    group = env.group(ins) if ins.comm is not None else None
    return writing(env, ins, lambda mine: mine if group is None else group.all_reduce(mine))


def update(env: Env, ins: Instr) -> Bound:
    """Step the optimizer."""
    slots = env.slots
    kinds = ("grad", "grad_shard", "grad_full")
    places = {slot.owner: env.at(slot) for slot in ins.reads if slot.kind in kinds}
    sums = next((env.at(slot) for slot in ins.reads if slot.kind == "total"), None)
    first = {name: place.start for name, place in env.setup.plans.places.items()}

    def run() -> None:
        gradients = {name: parts_of(slots[place]) for name, place in places.items()}
        totals = {} if sums is None else {name: cast(Tensor, slots[sums])[i] for name, i in first.items()}
        env.state.update(gradients, totals, weighted=env.setup.plans.weighted)

    return run


def broadcast(env: Env, ins: Instr) -> Bound:
    """Give the replicas the first one's buffers."""
    group, slots, places = env.group(ins), env.slots, [env.at(slot) for slot in ins.writes]

    def run() -> None:
        for place in places:
            slots[place] = group.broadcast(cast(Tensor, slots[place]))

    return run
